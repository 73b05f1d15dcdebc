"""The wheel holds what the server reads, and serves from it alone: nothing of the source tree is in reach."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from config.installation import version
from tests import calls
from tests.conftest import ROOT
from tests.live import LiveServer
from tests.wheels import PIP, build_wheel, source_files

SHIPPED = ("config", "engine", "inference", "management", "models")
COMMANDS = ("serve", "web", "reconcile", "deploy", "status", "doctor", "conformance", "health", "makesecret")
READY_S = 240
"""Kernels in a new place are compiled anew, which takes long where other tests run beside."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel alone, installed; what it depends on is in the interpreter's own environment."""
    target = tmp_path_factory.mktemp("site")
    command = [*PIP, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    return target


@dataclass
class InstalledServer(LiveServer):
    """`dragoman serve` in a folder of its own, with no settings but its ports."""

    site: Path = ROOT

    def settings(self) -> dict[str, str]:
        ours = super().settings()
        del ours["DRAGOMAN_DATA_DIR"], ours["DRAGOMAN_MODEL"]
        share = str(self.data_dir.parent)
        return {**ours, "PYTHONPATH": str(self.site), "XDG_DATA_HOME": share, "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture
def installed(site: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    made = InstalledServer(
        tmp_path / "share" / "dragoman",
        program=[sys.executable, str(site / "bin" / "dragoman")],
        folder=tmp_path / "empty",
        site=site,
    )
    yield made
    if made.process is not None:
        made.stop()


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_it_holds_every_file_of_its_packages_and_no_other(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = source_files()
    wanted = {f"dragoman/{name}" for name in sources if name.split("/")[0] in SHIPPED}
    assert held == wanted | {name for name in sources if name.startswith("dragoman/")}


@pytest.mark.timeout(2 * READY_S)
def test_it_serves(installed, site):
    reach = f"import importlib.util as u; print([u.find_spec(name) for name in {SHIPPED!r}])"
    told = subprocess.run(
        [sys.executable, "-c", reach], cwd=installed.folder, env=installed.settings(), capture_output=True, text=True
    )
    assert told.stdout.strip() == str([None] * len(SHIPPED)), told.stdout + told.stderr
    before = files(site)
    installed.start(wait=False).wait_ready(READY_S)
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    answer = installed.post("/v1/chat/completions", body).json()
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert {"json", "pirate"} <= {model["id"] for model in installed.get("/v1/models").json()["data"]}
    structured = {**body, "response_format": {"type": "json_object"}, "max_tokens": 8}
    assert installed.post("/v1/chat/completions", structured).status_code == 200  # a process of its own compiles
    assert installed.get("/version").json() == {"version": version()}
    assert installed.get("/openapi.json").json()["info"]["version"] == version()
    assert installed.get("/docs", follow_redirects=True).status_code == 200
    for path in ("/admin/login/", "/static/admin/css/base.css", "/static/management/live_status.js"):
        assert calls.get(f"{installed.admin_url}{path}").status_code == 200, path
    assert run(installed, "health") == f"127.0.0.1:{installed.front_port} answers 200\n"
    planes = ["--djl", installed.djl_url, "--mindie", installed.mindie_url, "--triton-grpc", f"127.0.0.1:{installed.grpc_port}",
              "--torchserve-grpc", f"127.0.0.1:{installed.torchserve_inference_port}"]  # fmt: skip
    assert json.loads(run(installed, "conformance", installed.url, *planes, "--json"))["failed"] == 0
    [deployment] = json.loads(run(installed, "status", "--json"))["deployments"]
    assert (deployment["name"], deployment["state"]) == ("demo", "active")
    assert installed.stop() == 0, installed.log
    assert files(site) == before
    assert not files(installed.folder)
    assert {"dragoman.sqlite3", "secret-key", "admin-password"} <= files(installed.data_dir)


def run(installed: InstalledServer, *arguments: str, status: int = 0) -> str:
    """What a command of the installed program prints."""
    done = subprocess.run(
        [*installed.program, *arguments], cwd=installed.folder, env=installed.settings(), capture_output=True, text=True
    )
    assert done.returncode == status, (arguments, done.stdout, done.stderr)
    return done.stdout


def test_its_other_commands_are_those_of_manage_py(installed):
    assert run(installed, "--version") == f"{version()}\n"
    assert json.loads(run(installed, "doctor", "--json", status=doctor_status(installed)))["checks"]
    run(installed, "migrate", "--verbosity", "0")
    assert len(run(installed, "createkey", "client").strip()) > 20
    assert "No changes detected" in run(installed, "makemigrations", "--check", "--dry-run")
    run(installed, "deploy", "--keep")  # the demo model, from within the wheel
    [deployment] = json.loads(run(installed, "status", "--json"))["deployments"]
    assert deployment["name"] == "demo"
    run(installed, "status", "--check", status=1)
    run(installed, "makesecret", str(installed.folder / "secret"))


@pytest.mark.parametrize("command", COMMANDS)
def test_it_has_the_command(installed, command):
    assert command in run(installed, command, "--help")


def doctor_status(installed: InstalledServer) -> int:
    """A machine's own shortcomings are none of the wheel's: only errors are."""
    command = [*installed.program, "doctor", "--json"]
    done = subprocess.run(command, cwd=installed.folder, env=installed.settings(), capture_output=True, text=True)
    assert done.returncode < 2, done.stdout
    return done.returncode


def test_the_source_tree_says_the_same_version():
    told = subprocess.run([sys.executable, "manage.py", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert told.stdout == f"{version()}\n"
