"""Processes that start at once on an empty registry prepare it one after the other."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.postgresql import Cluster

PREPARE = """
import django, pathlib, sys
django.setup()
from config.preparation import prepare_registry
sys.stdin.read()
prepare_registry(pathlib.Path(sys.argv[1]))
"""
LOG_IN = """
import django, pathlib, sys
django.setup()
from django.contrib.auth import authenticate, get_user_model
assert get_user_model().objects.filter(is_superuser=True).count() == 1
assert authenticate(username="admin", password=pathlib.Path(sys.argv[1], "admin-password").read_text().strip())
"""


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request):
    if request.param == "sqlite":
        yield {}
        return
    cluster = Cluster()
    yield {"DRAGOMAN_DATABASE_URL": cluster.url}
    cluster.remove()


@pytest.mark.timeout(300)
def test_three_at_once(tmp_path, database):
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "config.settings",
        "DRAGOMAN_DATA_DIR": str(tmp_path),
        **database,
    }

    def start(program: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, str(tmp_path)]
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(start(PREPARE)) for _ in range(3)]
        for process in started:  # all begin when the last one has been started
            process.stdin.close()
        for process in started:
            assert process.wait(240) == 0, process.stderr.read()
    with start(LOG_IN) as last:
        assert last.wait(240) == 0, last.stderr.read()
