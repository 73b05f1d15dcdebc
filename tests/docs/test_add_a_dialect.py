"""The dialect of docs/add-a-dialect.md, taken from the page, serves in a real server; its own tests pass there."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.live import LiveServer

pytestmark = pytest.mark.full

PAGE = (ROOT / "docs" / "add-a-dialect.md").read_text()
FILE = re.compile(r"`((?:inference|tests)/dialects/ollama/\w+\.py)`:\n\n```python\n(.*?)```", re.S)
FILES = dict(FILE.findall(PAGE))
COMMANDS = re.findall(r"^\$ (curl .*)$", PAGE, re.M)
# What `manage.py serve` does after the folder and its line in `inference/dialects/__init__.py` were added.
SERVE = """
import sys
from inference import dialects
dialects.__path__.append(sys.argv.pop(1))
dialects.DIALECTS += ("ollama",)
from django.core.management import execute_from_command_line
execute_from_command_line(["manage.py", *sys.argv[1:]])
"""


def linked(source, folder, without=None):
    """A new folder with links to all that another one has, but for one name."""
    folder.mkdir()
    for path in source.iterdir():
        if path.name != without:
            (folder / path.name).symlink_to(path)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A working copy, by links, with the page's files at their places."""
    folder = tmp_path_factory.mktemp("tree")
    (folder / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
    linked(ROOT / "inference", folder / "inference", without="dialects")
    linked(ROOT / "inference" / "dialects", folder / "inference" / "dialects")
    for name, code in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    (folder / "inference/dialects/ollama/__init__.py").write_text('"""Ollama: generate."""\n')
    return folder


@pytest.fixture(scope="module")
def server(tree, tmp_path_factory):
    program = [sys.executable, "-W", "ignore", "-c", SERVE, str(tree / "inference/dialects")]
    environment = {"DJANGO_SETTINGS_MODULE": "config.settings"}
    live = LiveServer(tmp_path_factory.mktemp("ollama") / "var", environment=environment, program=program).start()
    yield live
    assert live.stop() == 0, live.log


def test_the_page_has_every_file_of_the_dialect():
    assert set(FILES) == {
        "inference/dialects/ollama/errors.py",
        "inference/dialects/ollama/generate.py",
        "inference/dialects/ollama/dialect.py",
        "tests/dialects/ollama/test_generate.py",
    }
    assert PAGE.count("```python\n") == len(FILES)


def test_the_code_is_in_this_projects_style(tree):
    """In the whole tree, because the order of imports depends on what is this project's."""
    for command in (["check", "--no-cache"], ["format", "--no-cache", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *FILES], cwd=tree, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_pages_own_tests_pass(server, tree):
    spec = importlib.util.spec_from_file_location("page", tree / "tests/dialects/ollama/test_generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tests = [member for name, member in inspect.getmembers(module, inspect.isfunction) if name.startswith("test_")]
    assert len(tests) == 5
    for test in tests:
        test(server)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_pages_commands_are_answered(server, command):
    command = command.replace("http://127.0.0.1:8000", server.url).replace("curl ", "curl -sS --fail-with-body ", 1)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    first = json.loads(done.stdout.splitlines()[0])
    assert first.get("response") or first["models"][0]["name"] == "demo"


def test_its_routes_are_documented_and_counted_like_all_others(server):
    assert server.get("/openapi.json").json()["paths"]["/api/generate"]["post"]["summary"] == "Continue a prompt"
    before = server.metric("vllm:request_success_total")
    server.post("/api/generate", {"model": "demo", "prompt": "a", "stream": False, "options": {"num_predict": 1}})
    assert server.metric("vllm:request_success_total") == before + 1
