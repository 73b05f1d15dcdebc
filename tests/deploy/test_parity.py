"""The compose file's services run as it says: the same commands, users, variables, volumes, health checks and order, as local
processes with roots of their own, against a real PostgreSQL. `tests/deploy/containers.py` says how.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from tests.deploy.compose import services
from tests.deploy.containers import Project, skip_unless_possible
from tests.postgresql import binaries
from tests.waiting import wait_until
from tests.wheels import build_wheel

START_S = 300
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
ASK = """
import json, sys, urllib.error, urllib.request
key = open(sys.argv[2]).read().strip() if sys.argv[2] else ""
headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
data = sys.argv[3].encode() if len(sys.argv) > 3 else None
try:
    answer = urllib.request.urlopen(urllib.request.Request(sys.argv[1], data, headers), timeout=60)
    print(answer.status)
except urllib.error.HTTPError as error:
    answer = error
    print(error.code)
for line in answer:
    print(line.decode(), end="", flush=True)
"""
pytestmark = [pytest.mark.full, pytest.mark.timeout(3 * START_S)]


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the image has in /opt/dragoman: an environment with the wheel. What the wheel depends on is the tests' own."""
    folder = tmp_path_factory.mktemp("image")
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(venv)}))
    (packages / "dependencies.pth").write_text(os.path.realpath(sysconfig.get_path("purelib")) + "\n")
    python = str(venv / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(build_wheel(folder))]
    subprocess.run(install, check=True)
    program = venv / "bin" / "dragoman"
    program.write_text(program.read_text().replace(python, "/opt/dragoman/bin/python"))
    return venv


@pytest.fixture(scope="module")
def project(venv: Path):
    skip_unless_possible()
    binaries()
    running = Project(venv)
    try:
        running.up(services(), ["deploy", "metrics-key", "web"])
        yield running
    finally:
        running.down()


@pytest.fixture(scope="module")
def key(project: Project) -> str:
    """A client's key, made as the documentation says, in a file that the containers see."""
    made = project.exec("web", ["dragoman", "createkey", "my-client"])
    assert made.returncode == 0, made.stderr
    file = project.volume("data") / "client-key"
    file.write_text(made.stdout)
    os.chown(file, 10001, 10001)
    return "/data/client-key"


def ask(project: Project, url: str, key: str = "", body: object = None) -> tuple[int, str]:
    """Status and text of a request within the project's network."""
    content = [] if body is None else [json.dumps(body)]
    done = project.exec("web", ["/opt/dragoman/bin/python", "-c", ASK, url, key, *content])
    assert done.returncode == 0, done.stderr
    status, _, text = done.stdout.partition("\n")
    return int(status), text


def test_what_ends_has_ended_well(project):
    for name in ("secrets", "migrate", "metrics-key", "deploy"):
        assert project.containers[name].process.wait(START_S) == 0, project.containers[name].log.read_text()
    url = (project.volume("database-secret") / "url").read_text()
    password = (project.volume("database-secret") / "password").read_text()
    assert url == f"postgresql://dragoman:{password}@postgres/dragoman"
    redis = (project.volume("redis-secret") / "password").read_text()
    logs = "".join(container.log.read_text() for container in project.containers.values())
    for secret in (password, redis):
        assert len(secret) > 40
        assert secret not in logs


def test_the_services_become_healthy(project):
    for name in ("postgres", "redis", "reconcile", "web"):
        wait_until(
            lambda name=name: project.healthy(name), START_S, project.containers[name].log.read_text, every_s=0.5
        )


def test_each_is_locked_up(project):
    for name, user in (("postgres", "999"), ("redis", "999"), ("reconcile", "10001"), ("web", "10001")):
        status = project.exec(name, ["cat", "/proc/1/status"]).stdout
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert fields["Uid"].split()[0] == user
        assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
        assert fields["NoNewPrivs"] == "1"
        for path in ("/x", "/opt/x", "/usr/x", "/etc/x"):
            refused = project.exec(name, ["touch", path])
            assert refused.returncode == 1, (name, path)
            assert "Read-only" in refused.stderr or "denied" in refused.stderr
    for path in ("/data/x", "/tmp/x"):
        assert project.exec("web", ["touch", path]).returncode == 0, path
    assert project.exec("web", ["touch", "/secrets/database/x"]).returncode == 1


def test_a_request_is_answered(project, key):
    test_the_services_become_healthy(project)
    status, text = ask(project, "http://web:8000/v1/chat/completions", key, QUESTION)
    assert status == 200
    assert "Paris" in json.loads(text)["choices"][0]["message"]["content"]
    assert ask(project, "http://web:8000/v1/chat/completions", "", QUESTION)[0] == 401
    assert ask(project, "http://web:8080/admin/login/")[0] == 200
    assert ask(project, "http://web:8080/static/admin/css/base.css")[0] == 200


def test_rates_are_counted_in_redis(project, key):
    test_the_services_become_healthy(project)
    limited = project.exec("web", ["dragoman", "createkey", "limited", "--tokens-per-day", "1000000"])
    file = project.volume("data") / "limited-key"
    file.write_text(limited.stdout)
    os.chown(file, 10001, 10001)
    assert ask(project, "http://web:8000/v1/chat/completions", "/data/limited-key", QUESTION)[0] == 200
    password = (project.volume("redis-secret") / "password").read_text()
    name = f"dragoman:rates:{limited.stdout.partition('.')[0]}"
    spent = ["redis-cli", "--no-auth-warning", "-a", password, "hget", name, "spent"]
    wait_until(lambda: int(project.exec("redis", spent).stdout or 0) > 0, START_S)


def test_the_dialects_conform(project, key):
    test_the_services_become_healthy(project)
    done = project.exec(
        "web", ["dragoman", "conformance", "http://web:8000", "--key-file", key, "--json"], timeout=START_S
    )
    report = json.loads(done.stdout)
    assert done.returncode == 0, [check for check in report["checks"] if check["outcome"] == "failed"]
    assert {check["dialect"] for check in report["checks"] if check["outcome"] == "passed"} >= {
        "openai",
        "mindie",
        "torchserve",
    }


def test_prometheus_may_read_the_metrics_and_nothing_else(project):
    prometheus = services()["prometheus"]
    secret = project.volume("metrics-secret") / "key"
    assert (oct(secret.stat().st_mode)[-3:], secret.stat().st_gid) == ("640", 10001)
    assert prometheus.fields["group_add"] == ["10001"]
    copy = project.volume("data") / "metrics-key"  # its volume is not mounted in the web process's container
    copy.write_text(secret.read_text())
    os.chown(copy, 10001, 10001)
    wait_until(lambda: ask(project, "http://web:8000/metrics", "/data/metrics-key")[0] == 200, START_S)
    assert "vllm:num_requests_running" in ask(project, "http://web:8000/metrics", "/data/metrics-key")[1]
    assert ask(project, "http://web:8000/v1/models", "/data/metrics-key")[0] == 403


def test_the_status_is_as_it_was_asked_for(project):
    test_the_services_become_healthy(project)
    done = project.exec("web", ["dragoman", "status", "--check", "--json"])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row["name"] for row in found["deployments"]] == ["demo"]
    assert found["leader"]
    assert len(found["web_processes"]) == 1


def test_a_second_start_changes_nothing(project):
    found = services()
    before = {name: (project.volume("database-secret") / name).read_text() for name in ("url", "password")}
    key = (project.volume("metrics-secret") / "key").read_text()
    for name in ("secrets", "migrate", "metrics-key", "deploy"):
        project.containers.pop(name)
        again = project.start(found[name])
        assert again.process.wait(START_S) == 0, again.log.read_text()
    assert before == {name: (project.volume("database-secret") / name).read_text() for name in before}
    assert (project.volume("metrics-secret") / "key").read_text() == key


def test_a_web_process_lets_streams_end(project, key):
    """The last test: afterwards the web process is gone, and a new one takes its place."""
    test_the_services_become_healthy(project)
    body = {"model": "demo", "prompt": "Count:", "max_tokens": 200, "stream": True, "ignore_eos": True}
    call = ["/opt/dragoman/bin/python", "-c", ASK, "http://web:8000/v1/completions", key, json.dumps(body)]
    client = subprocess.Popen(project.exec_command("reconcile", call), stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    assert client.stdout.readline() == "200\n"
    assert client.stdout.readline().startswith("data: ")
    web = project.containers.pop("web")
    began = time.monotonic()
    assert web.stop() == 0, web.log.read_text()
    text, _ = client.communicate(timeout=60)
    assert text.rstrip().endswith("data: [DONE]"), text[-500:]
    assert time.monotonic() - began < 60
    assert project.healthy("reconcile")
    project.start(services()["web"])
    wait_until(lambda: project.healthy("web"), START_S, project.containers["web"].log.read_text, every_s=0.5)
    assert ask(project, "http://web:8000/v1/chat/completions", key, QUESTION)[0] == 200
    reconciler = project.containers["reconcile"]
    assert reconciler.stop() == 0, reconciler.log.read_text()
