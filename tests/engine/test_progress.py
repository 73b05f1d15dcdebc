"""What a worker tells of itself while it computes: reports of progress to its launcher, heartbeats to its clients."""

from __future__ import annotations

import queue
import socket
import threading
from types import SimpleNamespace

import pytest

from engine import messages
from engine.config import EngineConfig
from engine.failures import FinishReason
from engine.messages import (
    PROTOCOL_VERSION,
    FrameBuffer,
    Heartbeat,
    Hello,
    ModelInfo,
    Outputs,
    Ready,
    RequestOutput,
    Stats,
    StepHistograms,
    Submit,
    frame,
)
from engine.process import progress
from engine.process.progress import Progress, Pulse, Reporter, Reports
from engine.sampling.params import SamplingParams
from engine.server import EngineServer


@pytest.fixture
def reports(monkeypatch):
    """The reports of a process whose progress the test plays; a report comes every few milliseconds."""
    played, told = Progress(), queue.Queue()
    monkeypatch.setattr(progress, "progress", played)
    monkeypatch.setattr(progress, "REPORT_EVERY_S", 0.005)
    reporter = Reporter(told.put)
    reporter.start()
    yield played, told
    reporter.stop()


def test_a_process_that_was_suspended_was_not_quiet_for_that_long(monkeypatch):
    """Else a machine that slept for an hour would find its workers hung on waking."""
    clock, told = [0.0], []
    monkeypatch.setattr(progress, "progress", Progress())
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    reporter = Reporter(told.append)

    def wait(seconds: float) -> bool:
        clock[0] += 3600.0 if len(told) == 3 else seconds
        return len(told) == 6

    monkeypatch.setattr(reporter._stopped, "wait", wait)
    reporter._run()
    assert [report.quiet_s for report in told] == [0.0, 1.0, 2.0, 4.0, 5.0, 6.0]


def until(told, condition):
    while not condition(report := told.get()):
        pass
    return report


def test_no_report_of_loading_follows_the_one_that_it_is_ready():
    """The thread of the reports has found that the worker loads, and is held up before it says so."""
    told, entered, ready = [], threading.Event(), threading.Event()

    def report(state, **details):
        if state == "loading":
            entered.set()
            assert not ready.wait(0.05)
        told.append(state)
        if state == "ready":
            ready.set()

    both = Reports(report)
    beating = threading.Thread(target=both.beat, args=(Pulse("warming up", 0.0, 20.0),))
    beating.start()
    assert entered.wait(60)
    both.ready({})
    beating.join()
    both.beat(Pulse("serving", 0.0, 20.0))
    assert told == ["loading", "ready", "alive"]


def test_work_that_does_not_move_on_grows_quiet_and_moves_again(reports):
    played, told = reports
    played.begin("computing a step", expected_s=100.0)
    quiet = until(told, lambda report: report.quiet_s > 0.02)
    assert (quiet.doing, quiet.patience_s) == ("computing a step", 1000.0)
    played.moved()
    assert until(told, lambda report: report.quiet_s == 0.0).doing == "computing a step"


def test_compiling_is_no_hang(reports):
    played, told = reports
    played.begin("computing a step")
    with played.compiling("a kernel"):
        compiling = until(told, lambda report: report.doing == "compiling a kernel")
        assert compiling.patience_s == progress.COMPILING_PATIENCE_S
    assert until(told, lambda report: report.doing == "computing a step").patience_s == progress.PATIENCE_S


class OneStep:
    """A core whose only step lasts until it is let go."""

    blocked, failed_steps, transfers = False, 0, None

    def __init__(self):
        self.info = ModelInfo("", "", "", "", "cpu", 8, 8, [], 16, 1, 1, 1, 0, {})
        self.stats, self.histograms = Stats(running=1), StepHistograms()
        self.has_work, self.stepping, self.let_go = False, threading.Event(), threading.Event()

    def submit(self, client, message):
        self.client, self.message, self.has_work = client, message, True

    def step(self):
        self.stepping.set()
        self.let_go.wait()
        self.has_work = False
        return {self.client: [RequestOutput(self.message.request_id, [3], finish_reason=FinishReason.STOP)]}

    def refresh_stats(self):
        return self.stats

    def check_integrity(self):
        pass

    def abort_client(self, client):
        pass

    def close(self):
        pass


def test_clients_hear_of_a_worker_in_a_long_step(tmp_path):
    core = OneStep()
    server = EngineServer(core, EngineConfig(model="x", address=f"unix:{tmp_path / 'w.sock'}"))
    loop = threading.Thread(target=server.run)
    loop.start()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "w.sock"))
        buffer, received = FrameBuffer(), []

        def receive(kind):
            while True:
                while received:
                    message = received.pop(0)
                    if isinstance(message, kind):
                        return message
                received.extend(messages.to_client.decode(body) for body in buffer.feed(client.recv(1 << 16)))

        client.sendall(frame(Hello(PROTOCOL_VERSION, "worker", 0)))
        receive(Ready)
        client.sendall(frame(Submit(1, [2], SamplingParams(max_tokens=1))))
        core.stepping.wait()
        core.stats.running = 7  # so that this heartbeat is told from those of the loop
        server.beat()
        while receive(Heartbeat).stats.running != 7:
            pass
        core.let_go.set()
        assert receive(Outputs).outputs[0].token_ids == [3]
        server.draining = True
        loop.join()
