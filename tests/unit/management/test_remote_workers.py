"""The control channel over TCP: what a launcher on another host sees of a worker, and what it can make it do."""

from __future__ import annotations

import signal
import threading

import msgspec
import pytest

from engine.address import Channel, parse
from engine.failures import ExitStatus
from engine.messages import ModelInfo
from engine.process import control as control_module
from engine.process.control import Control
from management.launchers import link as link_module
from management.launchers.base import WorkerStatus
from management.launchers.leased import LeasedLauncher
from management.launchers.network import Network
from tests.certificates import Authority, credentials
from tests.live import OWN_PORTS
from tests.waiting import wait_until

LEASE_S = 60.0


class Worker:
    """A worker's control channel in this process. Signals that it would send itself are noted."""

    def __init__(self, address: str, files, monkeypatch, lease_s: float = LEASE_S) -> None:
        self.address, self.signals, self.expired = address, [], threading.Event()
        self.endpoint = parse(address).endpoint(files)
        monkeypatch.setattr(control_module.os, "kill", lambda _, number: self.signals.append(number))
        self.control = Control(self.endpoint, lease_s, self.expired.set)
        self.control.start()

    def close(self) -> None:
        """As the end of its process does."""
        self.control.close()
        for each in list(self.control._launchers):
            self.control._drop(each)

    def report(self, state: str, **details: object) -> None:
        self.control.report(msgspec.json.encode({"state": state, **details}) + b"\n", state != "alive")


@pytest.fixture
def network(tmp_path):
    authority = Authority()
    return Network("127.0.0.1", OWN_PORTS, credentials(tmp_path, authority, authority.issue()))


@pytest.fixture
def launcher(tmp_path, network):
    return LeasedLauncher(tmp_path / "run", network)


@pytest.fixture
def worker(launcher, network, monkeypatch):
    made = Worker(launcher.address("1-0-1"), network.credentials, monkeypatch)
    yield made
    made.close()


def adopted(launcher, worker):
    """The handle of a worker that knows of it."""
    before = len(worker.control._launchers)
    handle = launcher.adopt(worker.address, "demo/0/1")
    wait_until(lambda: len(worker.control._launchers) > before)
    return handle


def hear(handle, state: str) -> WorkerStatus:
    """The next status with this state."""
    found: list[WorkerStatus] = []

    def arrived() -> bool:
        found.extend(status for status in handle.statuses() if status.state == state)
        return bool(found)

    wait_until(arrived)
    return found[0]


def test_a_worker_that_runs_is_taken_over(launcher, worker):
    """What it said last about its state is said again to each launcher; what it is doing follows."""
    info = ModelInfo("/m", "/m/t.json", "Llama", "float32", "cpu", 8, 8, [2], 16, 1, 1, 1, 0, {})
    worker.report("loading")
    worker.report("ready", model=msgspec.to_builtins(info))
    for _ in range(2):
        handle = adopted(launcher, worker)
        assert handle.process_id is None
        assert hear(handle, "ready").model == info
        worker.report("alive")
        hear(handle, "alive")
        assert handle.exit_code() is None
        handle.release()
        wait_until(lambda: not worker.control._launchers)


def test_what_a_launcher_wants_is_done_in_order(launcher, worker):
    handle = launcher.adopt(worker.address, "demo/0/1")
    handle.renew(5)
    handle.drain()
    wait_until(lambda: worker.signals == [signal.SIGTERM])
    for _ in range(3):
        handle.renew(5)
    handle.hand_over()
    wait_until(lambda: worker.signals == [signal.SIGTERM] * 2)
    handle.renew(5)  # again, as the worker may have taken the two for one
    wait_until(lambda: worker.signals == [signal.SIGTERM] * 3)
    earlier = launcher.adopt(worker.address, "demo/0/1")  # one that has been replaced and does not know it
    earlier.renew(4)
    earlier.kill()
    assert earlier.exit_code() == -signal.SIGKILL
    handle.kill()
    wait_until(lambda: worker.signals == [signal.SIGTERM] * 3 + [signal.SIGKILL])
    assert handle.exit_code() == -signal.SIGKILL
    for each in (handle, earlier):
        each.release()


def test_a_command_that_was_lost_with_a_connection_is_said_again(launcher, worker):
    """Also both at once: each line brings the worker one step on."""
    handle = launcher.adopt(worker.address, "demo/0/1")
    handle._link._write, write = lambda line: None, handle._link._write
    handle.renew(5)
    handle.drain()
    handle.hand_over()
    handle._link._write = write
    assert worker.signals == []
    for count in (1, 2):
        handle.renew(5)
        wait_until(lambda count=count: worker.signals == [signal.SIGTERM] * count)
    handle.release()


@pytest.mark.parametrize(
    ("last", "status"),
    [("exited", ExitStatus.STOPPED), ("failed", ExitStatus.MODEL_REFUSED), ("alive", -signal.SIGKILL)],
)
def test_how_a_worker_ended_is_told_by_its_last_word(launcher, worker, last, status):
    handle = adopted(launcher, worker)
    worker.report(last)
    hear(handle, last)
    assert handle.exit_code() is None
    worker.close()
    wait_until(lambda: handle.exit_code() == status)
    handle.release()


def test_a_worker_that_nobody_reaches_is_not_there(launcher, network, tmp_path):
    assert launcher.adopt(launcher.address("1-0-1"), "demo/0/1") is None
    stranger = Authority("stranger")
    other = LeasedLauncher(tmp_path / "other", Network(credentials=credentials(tmp_path, stranger, stranger.issue())))
    assert other.address("1-0-1").startswith("unix:")
    door = parse(launcher.address("1-0-2")).endpoint(network.credentials)
    listener = door.listen(Channel.CONTROL)
    assert other.adopt(f"tcp://127.0.0.1:{door._listener.getsockname()[1]}", "demo/0/1") is None
    door.release(Channel.CONTROL)
    listener.close()


def test_both_sides_give_up_a_silent_connection(launcher, worker, monkeypatch):
    """The launcher connects again; the worker keeps no connections of launchers that have vanished."""
    monkeypatch.setattr(link_module, "SILENT_S", 0.5)
    monkeypatch.setattr(control_module, "LAUNCHER_SILENT_S", 0.5)
    handle = adopted(launcher, worker)
    (first,) = worker.control._launchers
    wait_until(lambda: first not in worker.control._launchers)
    worker.report("ready")
    hear(handle, "ready")
    handle.release()
    wait_until(lambda: not worker.control._launchers)


def test_a_lease_that_nobody_renews_runs_out(launcher, network, monkeypatch):
    worker = Worker(launcher.address("1-0-1"), network.credentials, monkeypatch, lease_s=2.0)
    handle = launcher.adopt(worker.address, "demo/0/1")
    for _ in range(20):
        handle.renew(1)
        assert not worker.expired.wait(0.2)
    assert worker.expired.wait(60)
    worker.close()
    handle.release()
