"""Runs scripts in the clients' own environment against the live server."""

from __future__ import annotations

import os
import subprocess
import textwrap

import pytest

from tests.conftest import ROOT

PYTHON = ROOT / ".venv-clients" / "bin" / "python"
PROTOCOL_PYTHON = ROOT / ".venv-protocol-clients" / "bin" / "python"


@pytest.fixture
def run_client(server):
    """Run a client program in which the server's addresses are defined. Returns what it printed."""

    def run(program: str, python: os.PathLike[str] | str = PYTHON, url: str = server.url) -> str:
        assert os.path.exists(python), "the clients' environment is missing: run `make setup-dev`"
        names = {"URL": url, "HOST": url.removeprefix("http://"), "GRPC": f"127.0.0.1:{server.grpc_port}",
                 "MINDIE": server.mindie_url, "MANAGEMENT": server.management_url}  # fmt: skip
        code = "".join(f"{name} = {value!r}\n" for name, value in names.items()) + textwrap.dedent(program)
        # huggingface_hub's offline mode refuses even loopback.
        environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
        done = subprocess.run(
            [python, "-W", "ignore", "-c", code],
            capture_output=True,
            text=True,
            timeout=300,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture
def run_protocol_client(run_client):
    """The same with the clients of the newer environment."""
    return lambda program, **options: run_client(program, python=PROTOCOL_PYTHON, **options)
