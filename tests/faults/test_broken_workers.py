"""Workers that fail, hang, kill themselves and cut their messages, by fault points in real processes."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests import calls
from tests.conftest import DEMO
from tests.live import LiveServer, events
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PATIENCE_S = 240
POISON = 1735
"""A token of the demo model's vocabulary that no text here contains."""
ASK = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
POISONED = {**ASK, "prompt": [POISON, 300, 301]}
LONG = {**ASK, "max_tokens": 1500, "stream": True}


@contextlib.contextmanager
def faulty(folder: Path, faults: str, wait: bool = True, **settings: str) -> Iterator[LiveServer]:
    """A server with these faults; it ends well whatever happened."""
    environment = {"DRAGOMAN_FAULTS": faults, "DRAGOMAN_ENABLE_FAULTS": "1", **settings}
    live = LiveServer(folder / "var", environment=environment).start(wait)
    try:
        yield live
        assert live.stop() == 0, live.log
    finally:
        if live.process.poll() is None:
            live.process.kill()


class Background:
    """A request on a thread."""

    def __init__(self, server: LiveServer, body: dict[str, object]) -> None:
        self.answer: httpx.Response | None = None
        self._thread = threading.Thread(target=self._ask, args=(server, body))
        self._thread.start()

    def _ask(self, server: LiveServer, body: dict[str, object]) -> None:
        self.answer = calls.post(f"{server.url}/v1/completions", json=body, timeout=390)

    @property
    def runs(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> httpx.Response:
        self._thread.join(300)
        assert self.answer is not None
        return self.answer


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def streamed(answer: httpx.Response) -> str:
    """The text of a stream that ended as it should."""
    *chunks, done = events(answer)
    assert done == "[DONE]"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length", chunks[-1]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def test_a_step_that_fails_costs_its_requests_alone(tmp_path):
    with faulty(tmp_path, f"step:raise::@{POISON}") as live:
        (worker,) = live.workers()
        alone = text_of(live.post("/v1/completions", ASK))
        for _ in range(3):
            failed = live.post("/v1/completions", POISONED)
            assert failed.status_code == 500
            assert "Traceback" not in failed.text
            assert "fault" not in failed.text
            assert text_of(live.post("/v1/completions", ASK)) == alone
        live.wait_idle()  # every block is back
        assert [each.pid for each in live.workers()] == [worker.pid]


def test_when_every_step_fails_the_worker_gives_up_and_is_replaced(tmp_path):
    with faulty(tmp_path, "step:raise", DRAGOMAN_HOLD_S="60") as live:
        (worker,) = live.workers()
        begin = time.monotonic()
        for _ in range(2):
            assert live.post("/v1/completions", ASK).status_code in (500, 503)
        wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, PATIENCE_S)
        took = time.monotonic() - begin
        print(f"\nseconds from the first failed step to the worker's end: {took:.2f}")
        live.wait_ready(PATIENCE_S)
        assert [each.pid for each in live.workers()] != [worker.pid]
        assert "2 steps failed in a row" in live.log


def test_a_request_that_kills_its_worker_kills_two_and_is_refused(tmp_path):
    """The client tries again and again, as clients do; a neighbour's stream goes on to its end all the same."""
    with faulty(tmp_path, f"step:exit:9:@{POISON}", DRAGOMAN_REPLAY_WAIT_S="280") as live:
        undisturbed = streamed(live.post("/v1/completions", LONG))
        neighbour = Background(live, LONG)
        wait_until(lambda: live.metric("vllm:num_requests_running") == 1)
        statuses = [calls.post(f"{live.url}/v1/completions", json=POISONED, timeout=390).status_code for _ in range(6)]
        assert all(400 <= status < 600 for status in statuses), statuses
        assert streamed(neighbour.end()) == undisturbed
        live.wait_ready(PATIENCE_S)
        deaths = live.metric("dragoman_replays_total", cause="worker_died")
        print(f"\nstatuses of the poisonous request: {statuses}; replays of sequences: {deaths}")
        last = live.post("/v1/completions", POISONED)
        assert last.status_code == statuses[-1]
        assert live.log.count("worker ready") == 3, "two deaths, two replacements"
        assert text_of(live.post("/v1/completions", ASK))


def test_a_step_that_never_ends_is_noticed_by_its_progress(tmp_path):
    """The process answers heartbeats, the step does not move: it is killed, and its neighbour goes on elsewhere."""
    with faulty(tmp_path, f"step:sleep:3600:@{POISON}", DRAGOMAN_REPLAY_WAIT_S="280") as live:
        (worker,) = live.workers()
        undisturbed = streamed(live.post("/v1/completions", LONG))
        neighbour = Background(live, LONG)
        wait_until(lambda: live.metric("vllm:num_requests_running") == 1)
        begin = time.monotonic()
        poisoned = Background(live, POISONED)
        wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, PATIENCE_S)
        print(f"\nseconds from the step's begin to the worker's end: {time.monotonic() - begin:.1f}")
        assert 400 <= poisoned.end().status_code < 600
        assert streamed(neighbour.end()) == undisturbed
        assert list((live.data_dir / "flight").iterdir()), "what it was doing is recorded"


def test_a_worker_that_ends_at_every_start_is_given_up(tmp_path):
    with faulty(tmp_path, "start:exit:1", wait=False) as live:
        begin = time.monotonic()
        wait_until(lambda: "The deployment demo failed" in live.log, PATIENCE_S, lambda: live.log)
        used = psutil.Process(live.process.pid).cpu_times()
        rows = live.post("/v2/repository/index", {}).json()
        assert [row["state"] for row in rows] == ["UNAVAILABLE"]
        refused = live.post("/v1/completions", ASK)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        print(f"\ngiven up after {time.monotonic() - begin:.1f} s; the server used {used.user + used.system:.1f} s")
        assert live.workers() == []


def test_a_message_that_is_cut_is_no_answer(tmp_path):
    """The connection ends within a message: the request goes on over the next connection, with the same text."""
    with faulty(tmp_path, "frame:cut:9:@Never") as live:
        expected = text_of(live.post("/v1/completions", {**ASK, "max_tokens": 60}))
    with faulty(tmp_path / "cut", "frame:cut:9:5-5,frame:cut:9:30-30", DRAGOMAN_REPLAY_WAIT_S="280") as live:
        answers = [live.post("/v1/completions", {**ASK, "max_tokens": 60}) for _ in range(4)]
        assert [text_of(answer) for answer in answers] == [expected] * 4
        assert "a fault point cut a frame" in live.log
        live.wait_idle()


def test_an_event_loop_that_stands_still_takes_no_worker_for_dead(tmp_path):
    """Heartbeats wait unread for longer than a worker may be silent; when the loop goes on nobody is replaced."""
    # One of these finds the server started.
    faults = ",".join(f"loop:sleep:25:{second}" for second in (20, 60, 120, 240))
    with faulty(tmp_path, faults) as live:
        (worker,) = live.workers()
        stood, streams = 0.0, []
        while stood < 10:
            streams.append(Background(live, LONG))
            while stood < 10 and streams[-1].runs:
                begin = time.monotonic()
                assert calls.get(f"{live.url}/ping", timeout=90).status_code == 200
                stood = time.monotonic() - begin
            assert len(streams) < 200, "the loop never stood still"
        print(f"\nthe loop stood still for {stood:.1f} s")
        assert len({streamed(stream.end()) for stream in streams}) == 1
        assert live.healthy()
        assert [each.pid for each in live.workers()] == [worker.pid]


def test_observed_state_that_cannot_be_written_stops_no_request(tmp_path):
    LiveServer(tmp_path / "var").start().stop()  # the migrations are writes too
    with faulty(tmp_path, "registry.write:raise::4-20@management_worker", DRAGOMAN_REPLAY_WAIT_S="280") as live:
        alone = text_of(live.post("/v1/completions", ASK))
        (worker,) = live.workers()
        worker.kill()
        assert text_of(live.post("/v1/completions", ASK)) == alone  # it waits for the next worker
        assert live.healthy()
        assert "the fault point 'registry.write'" in live.log


@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
def test_an_adapter_that_cannot_be_stored_leaves_nothing(tmp_path, error):
    model = tmp_path / "model"
    shutil.copytree(DEMO, model)  # elsewhere no adapter is registered at the start
    with faulty(tmp_path, f"adapter.copy:errno:{error}", DRAGOMAN_MODEL=str(model)) as live:
        body = {"lora_name": "pirate", "lora_path": str(DEMO.parent / "demo-adapters" / "pirate")}
        refused = live.post("/v1/load_lora_adapter", body)
        print(f"\n{refused.status_code} {refused.text}")
        assert refused.status_code in (500, 503, 507)
        assert str(live.data_dir) not in refused.text
        assert list((live.data_dir / "adapters").iterdir()) == []
        assert text_of(live.post("/v1/completions", ASK))
        assert "unhandled error" not in live.log
