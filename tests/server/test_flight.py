"""`manage.py flight` asks the workers of a running server for what their last steps were."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

PROMPT = "A prompt that nobody may read"


def flight(server, *arguments):
    command = [sys.executable, "-W", "ignore", "manage.py", "flight", *arguments]
    return subprocess.run(command, cwd=ROOT, env=server.settings(), capture_output=True, text=True, check=False)


def test_a_running_worker_writes_its_last_steps(server):
    assert server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4}).status_code == 200
    done = flight(server)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert path.parent == server.data_dir / "flight"
    assert path.stat().st_mode & 0o077 == 0
    header, *steps = [json.loads(line) for line in path.read_text().splitlines()]
    assert (header["worker"], header["cause"]) == ("demo/0", "asked")
    assert any(step["finished"] for step in steps)
    assert "nobody" not in path.read_text()
    assert server.healthy()


def test_only_the_named_worker_is_asked(server):
    assert len(flight(server, "demo/0").stdout.splitlines()) == 1


def test_a_worker_that_does_not_run_is_refused(server):
    done = flight(server, "demo/7")
    assert done.returncode == 1
    assert "no such worker runs on this machine: demo/7" in done.stderr
