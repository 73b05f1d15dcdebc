"""The clock on the wall is set forward and back by an hour while a server works: nothing waits, fails or is replaced for it."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import httpx
import pytest

from tests import calls
from tests.live import LiveServer, events
from tests.requirements import need
from tests.waiting import wait_until

STORY = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "temperature": 0, "stream": True}
HOUR_S = 3600


@pytest.fixture
def clock(tmp_path) -> tuple[str, Path]:
    """The library that shifts the clock, and the file that says by how much."""
    need("a C compiler")
    library, shift = tmp_path / "clock.so", tmp_path / "shift"
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    shift.write_text("0")
    return str(library), shift


def set_clock(shift: Path, seconds: int) -> None:
    """At once for whoever reads it meanwhile."""
    new = shift.with_suffix(".new")
    new.write_text(str(seconds))
    new.rename(shift)


def created(live: LiveServer) -> int:
    return live.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).json()["created"]


def text(answer: httpx.Response) -> str:
    """The whole text of a stream: how many tokens an event holds depends on how fast it is read."""
    return "".join(event["choices"][0]["text"] for event in events(answer)[:-1])


def test_an_hour_forward_and_back(clock, tmp_path):
    library, shift = clock
    # Variables with these beginnings reach the workers too.
    environment = {"LD_PRELOAD": library, "LC_CLOCK_SHIFT_FILE": str(shift)}
    live = LiveServer(tmp_path / "var", environment=environment).start()
    try:
        undisturbed = text(live.post("/v1/completions", STORY))
        (worker,) = live.workers()
        before, answers = created(live), []

        def tell() -> None:
            answers.append(calls.post(f"{live.url}/v1/completions", json=STORY, timeout=120))

        for seconds in (HOUR_S, -HOUR_S, 0):
            story = threading.Thread(target=tell)
            story.start()
            wait_until(lambda: live.metric("vllm:num_requests_running") == 1)
            set_clock(shift, seconds)
            assert abs(created(live) - before - seconds) < 300, "the server's clock has moved"
            story.join(120)
            steps = live.metric("vllm:iteration_tokens_total_count")
            wait_until(lambda: live.healthy())
            assert live.metric("vllm:iteration_tokens_total_count") >= steps
        for answer in answers:
            assert text(answer) == undisturbed
            assert events(answer)[-1] == "[DONE]"
        assert [each.pid for each in live.workers()] == [worker.pid]
        assert "Traceback" not in live.log
        assert live.stop() == 0, live.log
    finally:
        if live.process.poll() is None:
            live.process.kill()
