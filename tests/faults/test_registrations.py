"""Adapters are registered while the server or a worker is killed: what is listed answers, and no half file stays."""

from __future__ import annotations

import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from engine.adapters.files import content_digest
from management.adapter_store import INCOMING
from tests import calls
from tests.conftest import DEMO
from tests.live import LiveServer
from tests.models.adapters import make_adapter
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(500)
COUNT = 24
ASK = {"prompt": "What is 2 + 3?", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    for number in range(COUNT):
        make_adapter(DEMO, folder / f"a{number}", rank=4, seed=number)
    return folder


@pytest.fixture
def server(tmp_path):
    live = LiveServer(tmp_path / "var").start()
    yield live
    live.stop()


def register(live: LiveServer, source: Path) -> int:
    """In vLLM's or DJL Serving's words; 0 if the server went away."""
    try:
        if int(source.name[1:]) % 2:
            query = {"name": source.name, "src": str(source)}
            return calls.post(f"{live.djl_url}/models/demo/adapters", params=query, timeout=60).status_code
        body = {"lora_name": source.name, "lora_path": str(source)}
        return live.post("/v1/load_lora_adapter", body).status_code
    except httpx.TransportError:
        return 0


def assert_consistent(live: LiveServer) -> set[str]:
    """Everything that is listed answers, and the store holds whole content only."""
    listed = {card["id"] for card in live.get("/v1/models").json()["data"]}
    for name in listed:
        reply = live.post("/v1/completions", {**ASK, "model": name})
        assert reply.status_code == 200, (name, reply.text)
    for folder in (live.data_dir / "adapters").iterdir():
        if not folder.name.startswith(INCOMING):
            assert content_digest(folder) == folder.name
    return listed


@pytest.mark.slow
def test_the_server_is_killed_in_the_middle_of_registrations(server, adapters):
    sources = [adapters / f"a{number}" for number in range(COUNT)]
    chance = random.Random(7)
    for _ in range(2):
        with ThreadPoolExecutor(4) as pool:
            begun = [pool.submit(register, server, source) for source in sources]
            done = chance.randrange(3, COUNT)
            wait_until(
                lambda done=done, begun=begun: sum(future.done() for future in begun) >= done, 60, lambda: server.log
            )
            server.process.kill()
            server.process.wait()
            kept = {s.name for s, future in zip(sources, begun, strict=True) if future.result() == 200}
        server.start()
        assert kept <= assert_consistent(server)
        for name in kept:
            server.post("/v1/unload_lora_adapter", {"lora_name": name})
    for source in sources:
        assert register(server, source) in (200, 400, 409)  # registered just before the last kill, unseen by its client
    assert {source.name for source in sources} <= assert_consistent(server)


def test_a_worker_is_killed_in_the_middle_of_registrations(server, adapters):
    sources = [adapters / f"a{number}" for number in range(COUNT)]
    with ThreadPoolExecutor(4) as pool:
        begun = [pool.submit(register, server, source) for source in sources]
        wait_until(lambda: sum(future.done() for future in begun) >= 3, 60, lambda: server.log)
        (worker,) = server.workers()
        worker.send_signal(signal.SIGKILL)
        statuses = [future.result() for future in begun]
    assert set(statuses) <= {200, 503, 424}, statuses
    wait_until(lambda: server.post("/v1/completions", ASK).status_code == 200, 90, lambda: server.log)
    listed = assert_consistent(server)
    assert {source.name for source, status in zip(sources, statuses, strict=True) if status == 200} <= listed
    assert not {source.name for source, status in zip(sources, statuses, strict=True) if status != 200} & listed


@pytest.mark.slow
def test_what_a_killed_server_left_is_removed(server, adapters, tmp_path):
    """The copy of a large adapter is cut short by a kill."""
    big = tmp_path / "a1000"
    make_adapter(DEMO, big, rank=64, seed=1)
    store = server.data_dir / "adapters"
    incoming = None
    with ThreadPoolExecutor(4) as pool:
        for number in range(200):
            begun = pool.submit(register, server, big)
            while not begun.done() and incoming is None:
                incoming = next(store.glob(f"{INCOMING}*"), None)
            if incoming is not None:
                server.process.kill()
                server.process.wait()
                break
            server.post("/v1/unload_lora_adapter", {"lora_name": big.name})
            assert number < 199, "no copy was seen under way"
    server.start()
    wait_until(lambda: not list(store.glob(f"{INCOMING}*")), 90, lambda: server.log)
    assert_consistent(server)
