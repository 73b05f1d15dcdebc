"""What the reconciler relies on, of every launcher, with real workers: `management.launchers.base` says it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import threading

import psutil
import pytest

from engine.address import Channel, TcpAddress, parse
from engine.config import EngineConfig
from engine.failures import ExitStatus
from tests.conftest import DEMO, ROOT
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
START_S = 120
numbers = itertools.count(1)


class Held:
    """A worker, and what has been heard of it. A thread renews its lease, as the reconciler does."""

    def __init__(self, handle, address: str, epoch: int) -> None:
        self.handle, self.address, self.heard = handle, address, []
        self._lock, self._stop = threading.Lock(), threading.Event()
        self.number = epoch
        self._thread = threading.Thread(target=self._renew)
        self._thread.start()

    def _renew(self) -> None:
        while not self._stop.wait(0.25):
            self.look()

    def look(self) -> int | None:
        """One pass of a reconciler: its exit code first, then its reports."""
        with self._lock:
            self.handle.renew(self.number)
            code = self.handle.exit_code()
            self.heard += self.handle.statuses()
            self.address = next((each.address for each in self.heard if each.address), self.address)
            return code

    def until(self, state: str):
        wait_until(lambda: any(each.state == state for each in self.heard), START_S, lambda: str(self.heard[-5:]))
        return next(each for each in self.heard if each.state == state)

    def end(self) -> int:
        """The exit code, when there is one."""
        wait_until(lambda: self.look() is not None, 60, lambda: str(self.heard[-5:]))
        return self.look()

    def do(self, what: str) -> None:
        with self._lock:
            getattr(self.handle, what)()

    def forget(self) -> None:
        """Renew no more."""
        self._stop.set()
        self._thread.join()

    def let_go(self) -> None:
        self.forget()
        self.handle.release()


@pytest.fixture
def launcher(make):
    made = make()
    yield made
    made.close()


@pytest.fixture
def launch(launcher):
    """Launches workers that end with the test."""
    held: list[Held] = []

    def start(model: str = str(DEMO), lease_s: float = 60.0, secrets: dict[str, str] | None = None) -> Held:
        number = next(numbers)
        address = launcher.address(f"contract-{os.getpid()}-{number}")
        config = EngineConfig(
            model=model, worker_id="demo/0", epoch=number, address=address, lease_s=lease_s, threads=launcher.threads(2)
        )
        handle = retried(lambda: launcher.launch(config, secrets))
        held.append(Held(handle, address, number))
        return held[-1]

    yield start
    for each in held:
        if each.look() is None:
            each.do("kill")
        each.let_go()


def retried(launch):
    """The reconciler tries again when a worker cannot be launched at the moment."""
    found = []

    def attempt() -> bool:
        with contextlib.suppress(OSError):
            found.append(launch())
        return bool(found)

    wait_until(attempt, 60)
    return found[0]


def process_of(worker: Held) -> psutil.Process:
    """The engine of this tree that listens there. Processes that it forks may hold its sockets too."""
    place = parse(worker.address)
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            ours = process.cmdline()[1:] == ["-m", "engine"] and process.cwd() == str(ROOT)
            if ours and any(is_at(each, place) for each in process.net_connections(kind="all")):
                found.append(process)
    assert found, f"nobody listens at {worker.address}"
    return min(found, key=lambda process: process.create_time())


def is_at(connection, place) -> bool:
    """Whether the socket listens at the address, and at no other."""
    if isinstance(place, TcpAddress):
        return connection.status == psutil.CONN_LISTEN and tuple(connection.laddr) == (place.host, place.port)
    return connection.laddr == place.path


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def answers(launcher, address: str) -> bool:
    """Whether somebody takes requests there."""

    async def connect() -> None:
        _, writer = await parse(address).connect(Channel.REQUESTS, launcher_credentials(launcher))
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    try:
        asyncio.run(connect())
    except OSError:
        return False
    return True


def launcher_credentials(launcher):
    return launcher._network.credentials


def test_a_worker_loads_gets_ready_and_drains(launcher, launch):
    """Its status lines come in order, its address answers, it gets its secrets and none of this process's."""
    os.environ["DRAGOMAN_TEST_SECRET"] = "of the server"
    try:
        worker = launch(secrets={"HF_TOKEN": "hf_of_this_worker"})
        ready = worker.until("ready")
    finally:
        del os.environ["DRAGOMAN_TEST_SECRET"]
    assert ready.model.architecture
    states = [each.state for each in worker.heard if each.state != "alive"]
    assert states == sorted(states, key=("loading", "ready").index)
    worker.until("alive")
    assert answers(launcher, worker.address)
    process = process_of(worker)
    environment = process.environ()
    assert environment["HF_TOKEN"] == "hf_of_this_worker"
    assert not {name for name in environment if name.startswith(("DRAGOMAN_", "RAY_"))}
    worker.do("drain")
    assert worker.end() == ExitStatus.STOPPED
    wait_until(lambda: gone(process))
    assert not answers(launcher, worker.address)


def test_a_worker_that_is_killed_is_gone(launcher, launch):
    worker = launch()
    worker.until("ready")
    process = process_of(worker)
    worker.do("kill")
    assert worker.look() == -signal.SIGKILL
    wait_until(lambda: gone(process), 20)


def test_a_worker_that_dies_is_known_to_be_dead(launcher, launch):
    worker = launch()
    worker.until("ready")
    process = process_of(worker)
    process.kill()
    assert worker.end() == -signal.SIGKILL


def test_a_model_that_cannot_be_served_is_refused_with_its_reason(launch, tmp_path):
    worker = launch(model=str(tmp_path / "nothing"))
    assert worker.end() == ExitStatus.MODEL_REFUSED
    assert any(each.state == "failed" and "nothing" in each.reason for each in worker.heard)


def test_another_launcher_takes_a_worker_over_and_drains_it(make, launch):
    """The first one's word counts no more."""
    worker = launch()
    worker.until("ready")
    second = make()
    handle = second.adopt(worker.address, f"demo/0/{worker.number}")
    held = Held(handle, worker.address, worker.number + 1000)
    assert held.until("ready").model.architecture
    held.do("drain")
    held.do("hand_over")
    assert held.end() == ExitStatus.STOPPED
    held.let_go()
    assert second.adopt(worker.address, f"demo/0/{worker.number}") is None
    second.close()
    assert worker.end() == ExitStatus.STOPPED


def test_a_worker_whose_lease_nobody_renews_ends_itself(launcher, launch):
    worker = launch(lease_s=5.0)
    worker.until("ready")
    process = process_of(worker)
    worker.forget()
    wait_until(lambda: gone(process), 30)


def test_where_nobody_listens_nothing_is_taken_over(launcher):
    assert launcher.adopt(launcher.address("nobody"), "demo/0/1") is None
