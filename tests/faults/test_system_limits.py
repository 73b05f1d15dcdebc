"""What the system has too little of: descriptors, memory, room on a disk, and connections to the database."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import httpx
import psutil
import psycopg
import pytest

from tests import calls
from tests.conftest import DEMO
from tests.live import LiveServer, events
from tests.management.admin_login import log_in
from tests.postgresql import PASSWORD, Cluster
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PATIENCE_S = 240
ASK = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
STORY = {**ASK, "max_tokens": 1500, "ignore_eos": True, "stream": True}


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_without_descriptors_streams_go_on_and_connections_are_taken_later(tmp_path):
    """The process has no descriptor left for a further connection: it neither ends nor spins, and what it has goes on."""
    live = LiveServer(tmp_path / "var").start()
    process = psutil.Process(live.process.pid)
    crowd: list[socket.socket] = []
    streamed: list[httpx.Response] = []
    try:
        story = threading.Thread(
            target=lambda: streamed.append(calls.post(f"{live.url}/v1/completions", json=STORY, timeout=390))
        )
        story.start()
        wait_until(lambda: live.metric("vllm:num_requests_running") == 1)
        hard = process.rlimit(psutil.RLIMIT_NOFILE)[1]
        with httpx.Client(base_url=live.url, timeout=60) as kept:
            assert kept.get("/ping").status_code == 200
            process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + 4, hard))
            with contextlib.suppress(OSError):
                for _ in range(60):
                    crowd.append(socket.create_connection(("127.0.0.1", live.front_port), timeout=5))
            used = process.cpu_times()
            begin = time.monotonic()
            for _ in range(20):
                assert kept.get("/ping").status_code == 200  # what is open is served
                time.sleep(0.1)  # a loop that spins on a connection which it cannot take would show here
            spent = process.cpu_times()
            share = (spent.user + spent.system - used.user - used.system) / (time.monotonic() - begin)
            print(f"\nwithout descriptors the server uses {share:.0%} of a core beside a stream")
        assert "no file descriptor is left" in live.log
        for connection in crowd:
            connection.close()
        process.rlimit(psutil.RLIMIT_NOFILE, (hard, hard))
        wait_until(lambda: live.get("/ping").status_code == 200, PATIENCE_S)
        story.join(390)
        assert events(streamed[0])[-1] == "[DONE]"
        assert text_of(live.post("/v1/completions", ASK))
        assert live.process.poll() is None
        assert live.stop() == 0, live.log[-3000:]
    finally:
        if live.process.poll() is None:
            live.process.kill()


def test_workers_are_ended_before_the_server_when_memory_is_out(tmp_path):
    live = LiveServer(tmp_path / "var").start()
    try:
        server, (worker,) = psutil.Process(live.process.pid), live.workers()
        scores = [int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (server.pid, worker.pid)]
        assert scores[1] >= scores[0] + 500
        for child in worker.children(recursive=True):
            assert int(Path(f"/proc/{child.pid}/oom_score_adj").read_text()) >= scores[1]
    finally:
        assert live.stop() == 0


@contextlib.contextmanager
def memory_group(limit_bytes: int):
    """A cgroup of this machine with a limit of memory; skips where there are none."""
    group = Path("/sys/fs/cgroup/memory") / f"dragoman-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
    except OSError as error:
        pytest.skip(f"no cgroup with a limit of memory can be made: {error}")
    try:
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        with contextlib.suppress(OSError):
            wait_until(lambda: not (group / "cgroup.procs").read_text().split())
            group.rmdir()


def test_a_worker_that_the_kernel_ends_is_replaced_and_its_request_goes_on(tmp_path):
    """Its group has a limit below what it has: the kernel kills it as it does when memory is out."""
    live = LiveServer(tmp_path / "var", environment={"DRAGOMAN_REPLAY_WAIT_S": "280"}).start()
    try:
        undisturbed = [e for e in events(live.post("/v1/completions", STORY)) if e != "[DONE]"]
        (worker,) = live.workers()
        answers: list[httpx.Response] = []
        story = threading.Thread(
            target=lambda: answers.append(calls.post(f"{live.url}/v1/completions", json=STORY, timeout=390))
        )
        with memory_group(1 << 30) as group:
            (group / "cgroup.procs").write_text(str(worker.pid))
            story.start()
            wait_until(lambda: live.metric("vllm:num_requests_running") == 1)
            begin = time.monotonic()
            # A process of the group that asks for more than there is: the kernel ends the one with the highest score.
            hog = subprocess.Popen(
                ["sh", "-c", f"echo $$ > {group}/cgroup.procs; echo -1000 > /proc/self/oom_score_adj; "
                 "exec python3 -c 'import time; kept = bytearray(1100 << 20); time.sleep(60)'"],
            )  # fmt: skip
            try:
                wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, PATIENCE_S)
            finally:
                hog.kill()
                hog.wait()
        assert live.process.poll() is None
        story.join(390)
        print(f"\n{time.monotonic() - begin:.1f} s from the kill to the end of the stream")
        got = [e for e in events(answers[0]) if e != "[DONE]"]
        assert "".join(e["choices"][0]["text"] for e in got) == "".join(e["choices"][0]["text"] for e in undisturbed)
        live.wait_ready(PATIENCE_S)
        assert live.stop() == 0, live.log[-3000:]
    finally:
        if live.process.poll() is None:
            live.process.kill()


def test_without_connections_to_the_database_models_are_served(tmp_path):
    """Somebody holds every connection that PostgreSQL has; management is refused in seconds, and all recovers."""
    cluster = Cluster()
    held: list[psycopg.Connection] = []
    live = LiveServer(tmp_path / "var", environment={"DRAGOMAN_DATABASE_URL": cluster.url})
    try:
        with psycopg.connect(cluster.url, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET max_connections = 30")
        cluster.stop()
        cluster.start()
        live.start(wait=False)
        live.wait_ready(PATIENCE_S)
        with contextlib.closing(log_in(live.admin_url, live.data_dir)) as admin:
            with contextlib.suppress(psycopg.OperationalError):
                while len(held) < 40:
                    held.append(psycopg.connect(cluster.url, connect_timeout=30))
            for _ in range(3):
                assert text_of(live.post("/v1/completions", ASK))
                begin = time.monotonic()
                page = admin.get("/admin/management/deployment/")
                took_s = time.monotonic() - begin
                assert page.status_code in (200, 503)
                assert took_s < 60
            print(f"\n{len(held)} connections held; the admin answered {page.status_code} in {took_s:.1f} s")
            for connection in held:
                connection.close()
            wait_until(lambda: admin.get("/admin/management/deployment/").status_code == 200, PATIENCE_S)
        assert text_of(live.post("/v1/completions", ASK))
        assert PASSWORD not in live.log
        assert live.stop() == 0, live.log[-3000:]
    finally:
        for connection in held:
            connection.close()
        if live.process is not None and live.process.poll() is None:
            live.process.kill()
        cluster.remove()


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no disk of its own can be mounted: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_takes_no_adapter_in_part(small_disk):
    live = LiveServer(small_disk / "var").start()
    try:
        store = live.data_dir / "adapters"
        before = sorted(path.name for path in store.iterdir())
        with (small_disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 12)):
                pass
        other = small_disk.parent / "other"
        subprocess.run(["cp", "-r", str(DEMO.parent / "demo-adapters" / "pirate"), str(other)], check=True)
        config = json.loads((other / "adapter_config.json").read_text())
        (other / "adapter_config.json").write_text(json.dumps({**config, "revision": "other"}))
        refused = live.post("/v1/load_lora_adapter", {"lora_name": "other", "lora_path": str(other)})
        print(f"\n{refused.status_code} {refused.text}")
        assert refused.status_code in (500, 503, 507)
        assert str(small_disk) not in refused.text
        assert sorted(path.name for path in store.iterdir()) == before
        assert text_of(live.post("/v1/completions", ASK))
        (small_disk / "filler").unlink()
        taken = live.post("/v1/load_lora_adapter", {"lora_name": "other", "lora_path": str(other)})
        assert taken.status_code == 200, taken.text
    finally:
        status = live.stop()
    assert status == 0, live.log
