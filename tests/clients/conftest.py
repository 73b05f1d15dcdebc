"""Runs scripts in the clients' own environment against the live server."""

from __future__ import annotations

import os
import subprocess
import textwrap

import pytest

from tests.conftest import ROOT

PYTHON = ROOT / ".venv-clients" / "bin" / "python"


@pytest.fixture
def run_client(server):
    """Run a client program; `URL`, the server's or another, is defined in it. Returns what it printed."""

    def run(program: str, python: os.PathLike[str] | str = PYTHON, url: str = server.url) -> str:
        assert PYTHON.exists(), "the clients' environment is missing: run `make setup-dev`"
        code = f"URL = {url!r}\n" + textwrap.dedent(program)
        # huggingface_hub's offline mode refuses even loopback.
        environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
        done = subprocess.run(
            [python, "-W", "ignore", "-c", code],
            capture_output=True,
            text=True,
            timeout=90,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
