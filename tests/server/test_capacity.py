"""The rates of a real worker are measured, and a plan is made of them."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from tests.conftest import ROOT
from tools.bench.capacity import Rates


def test_measured_and_planned(server, tmp_path):
    rates = tmp_path / "rates.json"
    script = [sys.executable, "-W", "ignore", "-m", "tools.bench.capacity"]
    measured = [*script, "measure", "--url", server.url, "--streams", "1", "3", "--out", str(rates)]
    subprocess.run(measured, cwd=ROOT, check=True)
    found = msgspec.json.decode(rates.read_bytes(), type=Rates)
    assert found.prompt_tokens_s > 0
    assert set(found.output_tokens_s) == {1, 3}
    assert min(found.output_tokens_s.values()) > 0
    load = ["--requests", "0.001", "--prompt", "64", "--output", "16", "--speed", "0.001", "--prices", "1.5"]
    done = subprocess.run([*script, "plan", "--rates", str(rates), *load], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2].startswith("| demo |  | 1 | ")
    load[load.index("--speed") + 1] = "1e12"
    done = subprocess.run([*script, "plan", "--rates", str(rates), *load], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no kind of worker" in done.stderr
