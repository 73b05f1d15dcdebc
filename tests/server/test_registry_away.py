"""A PostgreSQL that is stopped, killed or paused, and a disk that is full: models go on, and all recovers by itself."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sqlite3
import subprocess
from pathlib import Path

import httpx
import psutil
import pytest
from django.db import OperationalError
from django.db.utils import ConnectionHandler

from config import settings
from tests.live import LiveServer, wait_until
from tests.postgresql import PASSWORD, Cluster

pytestmark = pytest.mark.timeout(600)  # a database, servers and workers are started again and again

PATIENCE_S = 240
QUESTION = {"prompt": "Once upon a time", "max_tokens": 2}


@pytest.fixture(scope="module")
def cluster():
    cluster = Cluster()
    yield cluster
    cluster.remove()


@pytest.fixture(scope="module")
def live(cluster, tmp_path_factory):
    server = LiveServer(
        tmp_path_factory.mktemp("away") / "var", environment={"DRAGOMAN_DATABASE_URL": cluster.url}
    ).start(wait=False)
    server.wait_ready(PATIENCE_S)
    yield server
    assert server.stop() == 0, server.log


OUTAGES = {
    "stopped": (Cluster.stop, Cluster.start),
    "killed": (Cluster.kill, Cluster.start),
    "paused": (Cluster.pause, Cluster.resume),
}


def index(live: LiveServer) -> httpx.Response:
    return live.post("/v2/repository/index", {})


def replace_worker(live: LiveServer) -> None:
    """Kill the worker and wait until another one answers."""
    (worker,) = live.workers()
    worker.kill()

    def replaced() -> bool:
        with contextlib.suppress(psutil.Error):  # between its death and its funeral
            return [other.pid for other in live.workers()] not in ([], [worker.pid])
        return False

    wait_until(replaced, PATIENCE_S, lambda: live.log)
    live.wait_ready(PATIENCE_S)
    assert live.post("/v1/completions", QUESTION).status_code == 200


def admin_page(admin: httpx.Client) -> httpx.Response:
    return admin.get("/admin/management/deployment/")


def log_in(live: LiveServer) -> httpx.Client:
    admin = httpx.Client(base_url=live.admin_url, timeout=PATIENCE_S, follow_redirects=True)
    form = admin.get("/admin/login/").text
    token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', form)[1]
    password = (live.data_dir / "admin-password").read_text().strip()
    page = admin.post(
        "/admin/login/?next=/admin/",
        data={"username": "admin", "password": password, "csrfmiddlewaretoken": token},
        headers={"referer": f"{live.admin_url}/admin/login/"},
    )
    assert page.status_code == 200
    assert "Log out" in page.text or "logout" in page.text
    return admin


@pytest.mark.parametrize("outage", OUTAGES)
def test_a_database_that_goes_and_comes_back(outage, live, cluster):
    leave, come_back = OUTAGES[outage]
    with contextlib.closing(log_in(live)) as admin:
        assert admin_page(admin).status_code == 200
        assert index(live).status_code == 200
        leave(cluster)
        try:
            for _ in range(3):
                refused = index(live)
                assert refused.status_code == 503
                assert refused.headers["retry-after"]
                page = admin_page(admin)
                assert page.status_code == 503
                assert page.headers["retry-after"]
            assert live.post("/v1/completions", QUESTION).status_code == 200
            wait_until(lambda: live.metric("dragoman_registry_reachable") == 0, PATIENCE_S, lambda: live.log)
            replace_worker(live)
        finally:
            come_back(cluster)
        wait_until(lambda: index(live).status_code == 200, PATIENCE_S, lambda: live.log)
        wait_until(lambda: live.metric("dragoman_registry_reachable") == 1, PATIENCE_S, lambda: live.log)
        wait_until(lambda: admin_page(admin).status_code == 200, PATIENCE_S, lambda: live.log)
        wait_until(lambda: index(live).json()[0]["state"] == "READY", PATIENCE_S, lambda: live.log)
        assert live.post("/v2/repository/models/demo/load", {}).status_code == 200
    assert PASSWORD not in live.log


@pytest.mark.django_db
def test_a_connection_does_not_wait_for_ever(cluster):
    """Its statement is on the way when the server stops answering; nothing on the wire tells so."""
    connection = ConnectionHandler({"default": settings._database(cluster.url)})["default"]

    def ask() -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
            assert cursor.fetchone() == (1,)

    ask()
    cluster.pause()
    try:
        with pytest.raises(OperationalError, match="no answer from the database within 6 s"):
            ask()
    finally:
        cluster.resume()
    connection.close_if_unusable_or_obsolete()
    ask()
    with pytest.raises(OperationalError, match="statement timeout"), connection.cursor() as cursor:
        cursor.execute("SELECT pg_sleep(60)")
    connection.close()


def test_a_worker_knows_no_password(live):
    (worker,) = live.workers()
    assert not any(name.startswith("DRAGOMAN_") for name in worker.environ())
    assert PASSWORD not in json.dumps(worker.environ())


def test_a_start_without_the_database_says_so(cluster, tmp_path):
    server = LiveServer(tmp_path / "var", environment={"DRAGOMAN_DATABASE_URL": cluster.url})
    cluster.stop()
    try:
        assert server.start(wait=False).process.wait(PATIENCE_S) == 1
    finally:
        cluster.start()
    assert "the registry cannot be used" in server.log
    assert "Traceback" not in server.log
    assert PASSWORD not in server.log


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of its own, which is easily filled."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"no disk of its own can be mounted: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """A file that takes the last byte."""
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 12)):
            pass
    return folder / "filler"


@pytest.mark.slow
def test_workers_are_replaced_while_the_disk_is_full(small_disk):
    live = LiveServer(small_disk / "var").start(wait=False)
    try:
        live.wait_ready(PATIENCE_S)
        filler = fill(small_disk)
        assert live.post("/v2/repository/models/demo/unload", {}).status_code == 503
        for _ in range(2):
            replace_worker(live)
        filler.unlink()
        wait_until(lambda: live.post("/v2/repository/models/demo/unload", {}).status_code == 200, PATIENCE_S)
        wait_until(lambda: index(live).json()[0]["state"] == "UNAVAILABLE", PATIENCE_S)
        assert live.post("/v2/repository/models/demo/load", {}).status_code == 200
        expected = [(1, "failed"), (2, "failed"), (3, "exited"), (4, "ready")]
        with contextlib.closing(sqlite3.connect(live.data_dir / "dragoman.sqlite3", timeout=60)) as database:
            query = "select epoch, state from management_worker order by epoch"
            wait_until(lambda: database.execute(query).fetchall() == expected, PATIENCE_S, lambda: live.log)
    finally:
        status = live.stop()
    assert status == 0, live.log


def test_a_model_that_ends_its_process_fails_at_once(tmp_path):
    live = LiveServer(tmp_path / "var").start(wait=False)
    wait_until(lambda: live.process.poll() is None and live.workers(), PATIENCE_S, lambda: live.log)
    wait_until(lambda: "Starting" in live.log, PATIENCE_S)
    (worker,) = live.workers()
    worker.send_signal(signal.SIGBUS)
    reason = "the worker was killed by SIGBUS while loading and verifying the model"
    wait_until(lambda: f"The deployment demo failed: {reason}" in live.log, PATIENCE_S, lambda: live.log)
    rows = live.post("/v2/repository/index", {}).json()
    assert [(row["state"], row["reason"]) for row in rows] == [("UNAVAILABLE", reason)]
    assert live.workers() == []
    assert live.stop() == 0, live.log
