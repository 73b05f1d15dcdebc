"""Locust against a real server: users of every dialect, targets that cannot be met, a master with workers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from loadtests.records import Record, read_record
from loadtests.samples import Outcome
from loadtests.shapes import DIALECTS, SHAPES
from tests.conftest import ROOT
from tests.live import LiveServer, free_port

TOKENS = 48
PATIENCE_S = 240
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(PATIENCE_S + 120),
]  # Locust and a server start, beside whatever else the machine does
STREAMS = {name for name in DIALECTS if "Stream" in name or name == "TritonGrpcUser"}
EXACT = set(DIALECTS) - {"TGIUser", "TGIStreamUser", "MindIEUser", "MindIEStreamUser", "TorchServeStreamUser"}
TARGETS = "[cpu-small.{shape}]\nfailures = 0\n{more}"


def places(server: LiveServer) -> dict[str, str]:
    """Where Locust finds the planes beside the front plane."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "LOAD_TRITON_GRPC": f"127.0.0.1:{server.grpc_port}",
        "LOAD_TORCHSERVE_GRPC": f"127.0.0.1:{server.torchserve_inference_port}",
        "LOAD_MINDIE": server.mindie_url,
        "LOAD_DJL": server.djl_url,
    }


def load(server: LiveServer, folder: Path, shape: str, *options: str, more: str = "", seconds: float = 1):
    """A run; the finished process and its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    targets = folder / "targets.toml"
    targets.write_text(TARGETS.format(shape=shape, more=more))
    command = [sys.executable, "-W", "ignore", "-m", "loadtests", "--host", server.url, "--shapes", shape,
               "--seconds", str(seconds), "--targets", str(targets), "--out", str(folder), *options]  # fmt: skip
    return subprocess.run(
        command, cwd=ROOT, env=places(server), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


@pytest.fixture(scope="module")
def everyone(server, tmp_path_factory) -> Record:
    """All dialects at once, a few seconds long."""
    folder = tmp_path_factory.mktemp("dialects")
    done = load(server, folder, "dialects", "--users", "2", seconds=2)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (folder / "report.html").read_text()
    assert "dialects" in page
    assert "<svg" in page
    return read_record(folder / "dialects.json")


@pytest.mark.parametrize("user", DIALECTS)
def test_users_of_every_dialect_check_their_answers(everyone, user):
    answers = [sample for sample in everyone.samples if sample.user == user]
    assert answers
    assert {sample.outcome for sample in answers} == {Outcome.OK}
    for sample in answers:
        assert sample.tokens == TOKENS if user in EXACT else 0 < sample.tokens <= TOKENS
        assert (sample.ttft_ms is not None) == (user in STREAMS)
        if sample.ttft_ms is not None:
            assert 0 < sample.ttft_ms <= sample.total_ms
            assert sample.ttft_ms + sum(sample.gaps_ms) <= sample.total_ms + 0.1  # gaps are rounded
            assert user not in EXACT or len(sample.gaps_ms) > 0


def test_the_run_is_compared_with_what_it_has_measured_before(everyone):
    assert [window.stage for window in everyone.windows] == ["warm-up", "alone", "engine", "all"]
    assert all(value is not None for value in everyone.figures.values())
    assert everyone.figures["silent_users"] == 0
    assert 0 < everyone.figures["throughput_share"] < 2


def test_a_target_that_cannot_be_met_fails_the_run_and_is_named(server, tmp_path):
    impossible = "throughput_share = 2\nttft_p95_multiple = 0.01\n"
    done = load(server, tmp_path, "ramp", "--users", "2", more=impossible)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "MISSED throughput_share" in done.stdout
    assert "MISSED ttft_p95_multiple" in done.stdout
    assert "2 of 3 targets missed" in done.stdout
    assert not read_record(tmp_path / "ramp.json").met


class Broken(BaseHTTPRequestHandler):
    """A server that lists a model, fails every request for it and keeps its metrics. With another path before it, it answers 401 to all."""

    def do_GET(self):
        closed = self.path.startswith("/closed") or self.path == "/metrics"
        self.answer(401 if closed else 200, b'{"data": [{"id": "demo"}]}')

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(500, b"{}")

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def broken():
    with ThreadingHTTPServer(("127.0.0.1", 0), Broken) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()


def test_a_server_that_refuses_fails_the_run(broken, tmp_path):
    targets = tmp_path / "targets.toml"
    targets.write_text(TARGETS.format(shape="ramp", more=""))
    command = [sys.executable, "-W", "ignore", "-m", "loadtests", "--host", broken, "--shapes", "ramp", "--users", "2",
               "--seconds", "1", "--targets", str(targets), "--out", str(tmp_path)]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1
    assert "MISSED failures" in done.stdout
    assert {sample.outcome for sample in read_record(tmp_path / "ramp.json").samples} == {Outcome.ERROR}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--shapes", "soak"], "needs --pid"),
        (["--seconds", "0"], "must be from 1"),
        (["--users", "0"], "must be from 1"),
        (["--profile", "tpu"], "invalid choice: 'tpu'"),
        (["--shapes", "spiral"], "invalid choice: 'spiral'"),
        (["--targets", "/nowhere.toml"], "/nowhere.toml"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_sent(options, told):
    command = [sys.executable, "-W", "ignore", "-m", "loadtests", "--host", f"http://127.0.0.1:{free_port()}", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert told in done.stderr


@pytest.mark.parametrize(
    ("host", "options", "told"),
    [
        ("http://127.0.0.1:{free}", [], "does not answer: [Errno 111] Connection refused"),
        ("{broken}/closed", [], "/v1/models answers 401; is LOAD_API_KEY a key of this server?"),
        ("nowhere", [], "is no list of models: is --host a front plane's URL?"),
        ("{broken}", ["--pid", str(1 << 30)], "--pid: there is no process 1073741824"),
        ("{broken}", ["--out", "/proc/nowhere"], "/proc/nowhere"),
        ("{broken}", ["--shapes", "burst", "--pid", "1"], "burst: needs --start-seconds"),
        ("{broken}", ["--shapes", "adapters"], "serves no adapters json, pirate (LOAD_ADAPTERS)"),
    ],
)
def test_a_run_that_can_measure_nothing_is_not_made(broken, host, options, told):
    address = host.format(broken=broken, free=free_port())
    command = [sys.executable, "-W", "ignore", "-m", "loadtests", "--host", address, "--shapes", "ramp", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_soak_needs_the_metrics(broken, monkeypatch):
    monkeypatch.setenv("LOAD_ADAPTERS", "demo")
    command = [sys.executable, "-W", "ignore", "-m", "loadtests", "--host", broken, "--shapes", "soak", "--pid", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    text = f"{broken}/metrics answers 401; is LOAD_API_KEY a key of this server?\n"
    assert (done.returncode, done.stderr) == (2, text)


def test_locusts_workers_serve_one_shape():
    command = [sys.executable, "-W", "ignore", "-m", "loadtests", "--host", "http://127.0.0.1:1", "--", "--master"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert "name one with --master" in done.stderr


def test_a_run_of_which_nothing_was_written_is_none(broken, tmp_path):
    """Locust ends with 1 also where it has not begun; what an earlier run has left says nothing."""
    targets = tmp_path / "targets.toml"
    targets.write_text(TARGETS.format(shape="ramp", more=""))
    left = tmp_path / "ramp.json"
    left.write_text("{}")
    command = [sys.executable, "-W", "ignore", "-m", "loadtests", "--host", broken, "--shapes", "ramp", "--targets", str(targets),
               "--out", str(tmp_path), "--", "-f", "/nowhere.py"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert "ramp: the run was not made" in done.stderr
    assert not left.exists()


def test_a_model_that_is_not_served_is_named(broken):
    command = [sys.executable, "-W", "ignore", "-m", "loadtests", "--host", broken, "--shapes", "ramp"]
    strangers = {**os.environ, "LOAD_MODEL": "nobody"}
    done = subprocess.run(
        command, cwd=ROOT, env=strangers, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stderr) == (2, f"{broken} serves no nobody (LOAD_MODEL); it serves demo\n")


def test_processes_of_one_machine_share_the_users(server, tmp_path):
    done = load(server, tmp_path, "ramp", "--users", "4", "--processes", "2", seconds=2)
    assert done.returncode == 0, done.stdout + done.stderr
    record = read_record(tmp_path / "ramp.json")
    last = [sample for sample in record.samples if sample.at_s >= record.windows[-1].begin_s]
    assert len({sample.worker for sample in last}) == 2
    assert all(stage.requests for stage in record.stages)


def test_an_open_loop_keeps_its_pace_whatever_is_answered(server, tmp_path):
    done = load(server, tmp_path, "open", "--users", "4", more="arrivals_share = 0.01\n", seconds=2)
    assert done.returncode == 0, done.stdout + done.stderr
    record = read_record(tmp_path / "open.json")
    stages = {stage.stage: stage for stage in record.stages}
    requests = [stages[f"arrivals-{share}"].requests for share in (25, 50, 80)]
    assert 0 < requests[0] < requests[2], "arrivals are random"
    assert record.figures["arrivals_share"] is not None


def test_a_master_has_the_samples_of_its_workers(server, tmp_path):
    port = str(free_port())
    follow = [sys.executable, "-W", "ignore", "-m", "locust", "-f", "loadtests/locustfile.py", "--worker",
              "--master-host", "127.0.0.1", "--master-port", port]  # fmt: skip
    workers = [
        subprocess.Popen(follow, cwd=ROOT, env=places(server), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(2)
    ]
    try:
        master = [
            "--",
            "--master",
            "--expect-workers",
            "2",
            "--master-bind-host",
            "127.0.0.1",
            "--master-bind-port",
            port,
        ]
        done = load(server, tmp_path, "ramp", "--users", "4", *master, seconds=2)
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    record = read_record(tmp_path / "ramp.json")
    last = [sample for sample in record.samples if sample.at_s >= record.windows[-1].begin_s]
    assert len({sample.worker for sample in last}) == 2
    assert all(sample.outcome is Outcome.OK for sample in record.samples)
    assert all(stage.requests for stage in record.stages), "samples of all stages have come, and in their windows"


@pytest.mark.skipif("LOAD_FULL" not in os.environ, reason="minutes: LOAD_FULL=1 runs every shape")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_with_a_server_of_its_own(shape, tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "loadtests", "--shapes", shape, "--out", str(tmp_path)]
    seconds = ["--seconds", "60"] if shape == "soak" else []
    done = subprocess.run([*command, *seconds], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
