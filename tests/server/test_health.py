"""`health`, as the health checks of containers call it; `status --check`, `deploy --keep` and `createkey --file` beside it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest

from tests.certificates import Authority, replace
from tests.cluster import MANAGE, Cluster
from tests.conftest import DEMO, ROOT
from tests.live import LiveServer, free_port
from tests.waiting import wait_until

START_S = 300
pytestmark = pytest.mark.timeout(3 * START_S)


def health(environment: dict[str, str], *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-W", "ignore", "manage.py", "health", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_alive_is_of_web_alone(server):
    code, text = health(server.settings(), "reconcile", "--alive")
    assert code == 2
    assert "--alive" in text


def test_a_server_is_healthy(server):
    assert health(server.settings()) == (0, f"127.0.0.1:{server.front_port} answers 200\n")
    everywhere = {**server.settings(), "DRAGOMAN_HOST": "0.0.0.0"}
    assert health(everywhere)[0] == 0


def test_nobody_answers():
    code, text = health({**os.environ, "DRAGOMAN_FRONT_PORT": str(free_port())})
    assert code == 1
    assert "does not answer" in text
    assert health({**os.environ, "DRAGOMAN_FRONT_PORT": "none"})[0] == 1


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory):
    made = Cluster(tmp_path_factory.mktemp("health") / "var")
    yield made
    made.stop()


def code_of(cluster: Cluster, *arguments: str) -> int:
    done = subprocess.run([*MANAGE, *arguments], cwd=ROOT, env=cluster.settings(), capture_output=True, timeout=START_S)
    return done.returncode


def test_processes_apart(cluster):
    settings = cluster.settings()
    assert health(settings, "reconcile")[0] == 1  # there are no tables yet
    assert code_of(cluster, "status", "--check") == 2
    cluster.run("migrate", "--verbosity", "0")
    assert health(settings, "reconcile") == (1, "no reconciler leads\n")
    web = cluster.start("web")
    wait_until(lambda: health(settings, "--alive")[0] == 0, START_S, lambda: cluster.log, every_s=0.5)
    code, text = health(settings)
    assert code == 1
    assert "no worker can take requests" in text
    cluster.start("reconcile")
    wait_until(lambda: health(settings, "reconcile")[0] == 0, START_S, lambda: cluster.log, every_s=0.5)
    wait_until(lambda: code_of(cluster, "status", "--check") == 0, START_S, lambda: cluster.log)
    cluster.run("deploy", str(DEMO), "--keep", "--from-settings", "--wait", str(START_S))
    assert health(settings)[0] == 0
    assert code_of(cluster, "status", "--check") == 0
    before = cluster.deployment()
    assert "demo is active" in cluster.run("deploy", "--keep", "--min-workers", "2")
    assert cluster.deployment()["workers_wanted"] == before["workers_wanted"] == 1
    assert code_of(cluster, "deploy", str(DEMO)) == 1  # without --keep it is refused
    assert "no web process" not in cluster.run("status", "--once")
    web.terminate()
    assert web.wait(60) == 0
    wait_until(lambda: code_of(cluster, "status", "--check") == 1, START_S)


def test_a_key_in_a_file(cluster, tmp_path):
    cluster.run("migrate", "--verbosity", "0")
    file = tmp_path / "key"
    make = ["createkey", "metrics", "--scope", "metrics", "--file", str(file)]
    assert cluster.run(*make) == ""
    first = file.read_text()
    assert len(first) > 20
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    cluster.run(*make)
    assert file.read_text() == first
    cluster.run("createkey", "metrics", "--scope", "infer", "--file", str(file))
    second = file.read_text()
    assert second != first
    file.write_text("no key")
    cluster.run(*make)
    assert file.read_text() not in ("no key", first, second)
    assert code_of(cluster, "createkey", "x", "--file", str(tmp_path / "none" / "key")) == 1


def test_a_server_with_mutual_tls(tmp_path):
    authority = Authority()
    certificate, key = authority.issue("server").write(tmp_path, "server")
    authorities = replace(tmp_path / "clients.pem", authority.pem)
    tls = {"DRAGOMAN_TLS_CERTIFICATE": str(certificate), "DRAGOMAN_TLS_KEY": str(key)}
    mutual = {**tls, "DRAGOMAN_TLS_CLIENT_AUTHORITIES": f'["{authorities}"]'}
    for environment, text in ((tls, "answers 200"), (mutual, "clients with a certificate")):
        live = LiveServer(tmp_path / f"var{len(environment)}", environment=environment)
        live.start(wait=False)
        try:
            wait_until(
                lambda live=live, text=text: text in health(live.settings())[1], START_S, lambda live=live: live.log
            )
            assert health(live.settings())[0] == 0
        finally:
            live.stop()
        assert health(live.settings())[0] == 1
