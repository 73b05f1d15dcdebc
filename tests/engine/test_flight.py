"""The flight recorder: the last steps in memory, and a file of them on a crash, on a hang and on request."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import textwrap
from itertools import takewhile

import msgspec
import pytest
import pytest_asyncio

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.process import flight
from engine.process.flight import FILES, Cause, FlightRecorder, StepRecord
from engine.sampling.params import SamplingParams
from tests.conftest import DEMO, ROOT
from tests.waiting import eventually, wait_until

pytestmark = pytest.mark.full

PROMPT = [301, 302, 303, 304, 305]
STEP_KEYS = {
    "at", "ms", "sequences", "prompt_tokens", "decode_tokens", "running", "waiting", "preemptions", "blocks_used",
    "finished", "failed",
}  # fmt: skip


def record(**changes):
    return StepRecord(**{
        "begin": 1.0, "sequences": 1, "prompt_tokens": 3, "decode_tokens": 0, "running": 1, "waiting": 0,
        "preemptions": 0, "blocks_used": 1, **changes,
    })  # fmt: skip


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_only_the_last_steps_are_kept_and_written(tmp_path):
    recorder = FlightRecorder(steps=3)
    recorder.open(str(tmp_path / "flight"), "demo/0", 7)
    for number in range(5):
        recorder.add(record(sequences=number, elapsed_s=0.25))
    recorder.add(record(sequences=5))
    path = recorder.write(Cause.ASKED)
    header, *steps = lines(path)
    assert (header["worker"], header["epoch"], header["cause"], header["steps"]) == ("demo/0", 7, "asked", 3)
    assert [step["sequences"] for step in steps] == [3, 4, 5]
    assert [step["ms"] for step in steps] == [250.0, 250.0, None]
    assert all(set(step) == STEP_KEYS for step in steps)
    assert path.name.startswith("demo-0-7-")
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [file.suffix for file in path.parent.iterdir()] == [".jsonl"]


def test_the_header_says_where_each_thread_is(tmp_path):
    recorder = FlightRecorder()
    recorder.open(str(tmp_path), "demo/0", 1)
    threads = lines(recorder.write(Cause.ASKED))[0]["threads"]
    assert any(
        place.endswith(" test_the_header_says_where_each_thread_is") for stack in threads.values() for place in stack
    )


def test_an_error_is_written_without_its_text(tmp_path):
    recorder = FlightRecorder()
    recorder.open(str(tmp_path), "demo/0", 1)
    try:
        raise ValueError("what a client sent")
    except ValueError as error:
        path = recorder.write(Cause.CRASH, error)
    assert lines(path)[0]["error"] == "ValueError"
    assert "what a client sent" not in path.read_text()


def test_a_hang_is_written_once(tmp_path):
    recorder = FlightRecorder()
    recorder.open(str(tmp_path), "demo/0", 1)
    for hangs in (False, True, True, False, True):
        recorder.watch(hangs)
    assert len(list(tmp_path.glob("*-hang.jsonl"))) == 2


def test_a_folder_keeps_the_newest_recordings(tmp_path):
    recorder = FlightRecorder()
    recorder.open(str(tmp_path), "demo/0", 1)
    written = [recorder.write(Cause.ASKED) for _ in range(FILES + 3)]
    assert {path for path in written if path.exists()} == set(written[3:])


def test_a_recording_that_another_worker_removes_meanwhile_costs_no_other_one(tmp_path):
    """A link to nothing stands for it: it is in the list, and gone when it is looked at."""
    recorder = FlightRecorder()
    recorder.open(str(tmp_path), "demo/0", 1)
    (tmp_path / "other-1-removed.jsonl").symlink_to(tmp_path / "nothing")
    path = recorder.write(Cause.ASKED)
    assert path is not None
    assert lines(path)[0]["cause"] == "asked"


def test_a_folder_that_cannot_be_written_costs_the_recording_alone(tmp_path, caplog):
    (tmp_path / "file").touch()
    recorder = FlightRecorder()
    recorder.open(str(tmp_path / "file" / "flight"), "demo/0", 1)
    assert recorder.write(Cause.ASKED) is None
    assert "the flight recording was not written" in caplog.text


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder = FlightRecorder()
    recorder.open("", "demo/0", 1)
    assert recorder.write(Cause.CRASH) is None
    assert list(tmp_path.iterdir()) == []


TROUBLED = textwrap.dedent(
    """
    import pathlib, runpy, time
    from engine.process import progress
    progress.REPORT_EVERY_S, progress.PATIENCE_S, progress.PATIENCE_FACTOR = 0.05, 1.0, 0.0
    trouble = pathlib.Path({folder!r})
    from engine import model_runner, server
    launch, exchange = model_runner.ModelRunner.launch, server.EngineServer._exchange
    def slow(self, batch):
        while (trouble / "hang").exists():
            time.sleep(0.05)
        return launch(self, batch)
    def crashing(self):
        if (trouble / "crash").exists():
            raise RuntimeError("what a client sent")
        exchange(self)
    model_runner.ModelRunner.launch, server.EngineServer._exchange = slow, crashing
    runpy.run_module("engine", run_name="__main__")
    """
)
"""A worker that hangs, or whose loop ends by an error, when the test says so."""


@pytest.fixture
def worker(tmp_path):
    path = str(tmp_path / "w.sock")
    config = EngineConfig(
        model=str(DEMO), address=f"unix:{path}", worker_id="w", epoch=3, threads=1, flight_dir=str(tmp_path / "flight"),
        log_format="json",
    )  # fmt: skip
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", TROUBLED.format(folder=str(tmp_path))],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
    process.stdin.write(msgspec.json.encode(config) + b"\n")
    process.stdin.flush()
    reports = iter(lambda: json.loads(process.stdout.readline()), None)
    assert {report["state"] for report in takewhile(lambda r: r["state"] != "ready", reports)} == {"loading"}
    process.folder, process.reports = tmp_path, reports
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


@pytest_asyncio.fixture
async def client(worker):
    client = EngineClient(f"unix:{worker.folder / 'w.sock'}", "w", 3)
    await client.connect()
    yield client
    await client.close()


async def generate(client, count):
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    return [token async for output in client.generate(PROMPT, params) for token in output.token_ids]


def recordings(worker, cause):
    return sorted((worker.folder / "flight").glob(f"w-3-*-{cause}.jsonl"))


async def test_a_worker_that_is_asked_writes_its_steps(worker, client):
    generated = await generate(client, 12)
    worker.send_signal(flight.SIGNAL)
    await eventually(lambda: recordings(worker, Cause.ASKED))
    path = recordings(worker, Cause.ASKED)[0]
    header, *steps = lines(path)
    assert header["process"] == worker.pid
    assert header["steps"] == len(steps) == client.stats.steps
    assert sum(step["prompt_tokens"] for step in steps) == len(PROMPT)
    assert sum(step["finished"] for step in steps) == 1
    assert all(step["ms"] > 0 for step in steps)
    told = path.read_text()
    # A single token's number may be that of a line of code too.
    assert all(", ".join(map(str, tokens[:3])) not in told for tokens in (PROMPT, generated))
    assert header.keys() == {"worker", "epoch", "process", "cause", "at", "doing", "steps", "threads"}
    assert (await generate(client, 2)) == generated[:2]


async def test_a_step_that_hangs_is_written_before_the_launcher_hears_of_it(worker, client):
    (worker.folder / "hang").touch()
    running = client.generate(PROMPT, SamplingParams(max_tokens=2, temperature=0.0))
    first = asyncio.ensure_future(anext(running))
    await eventually(lambda: next(worker.reports).get("quiet_s", 0.0) > 1.0)
    header, *steps = lines(recordings(worker, Cause.HANG)[-1])
    assert header["doing"] == "computing a step"
    assert any(place.endswith(" slow") for stack in header["threads"].values() for place in stack)
    assert (steps[-1]["ms"], steps[-1]["prompt_tokens"]) == (None, len(PROMPT))
    (worker.folder / "hang").unlink()
    assert (await first).token_ids
    await running.aclose()


async def test_a_loop_that_ends_by_an_error_writes_its_steps(worker, client):
    await generate(client, 4)
    done = client.stats.steps
    (worker.folder / "crash").touch()  # which the idle loop sees with its next heartbeat
    await eventually(lambda: client.failure)
    wait_until(lambda: worker.poll() not in (None, 0))
    header, *steps = lines(recordings(worker, Cause.CRASH)[0])
    assert header["error"] == "RuntimeError"
    assert any(place.endswith(" crashing") for place in header["raised"])
    assert len(steps) == done > 0
    assert "what a client sent" not in json.dumps(header)


async def test_the_log_of_a_worker_has_json_lines(worker):
    worker.send_signal(signal.SIGTERM)
    wait_until(lambda: worker.poll() == 0)
    logged = lines(worker.folder / "log")
    assert logged
    assert all({"worker", "event", "level", "timestamp"} <= set(line) for line in logged)
