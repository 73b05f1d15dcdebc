"""The comparison of the engine alone with the whole server runs to its end."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_engine_alone_and_the_whole_server_are_compared(tmp_path):
    found = tmp_path / "found.json"
    options = ["--model", "demo", "--streams", "2", "--rounds", "1", "--output-tokens", "8", "--json", str(found)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tools.bench.server", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(found.read_text())["rows"]
    assert row["streams"] == 2
    assert min(row["engine_tokens_per_s"], row["server_tokens_per_s"], row["floor_tokens_per_s"]) > 0
