"""The device kernels compile for real architectures, which Triton's interpreter does not show, and fit into their shared memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("architecture", "dims"),
    [pytest.param("89", "256", id="wide heads and little memory"), pytest.param("90", "64", id="H100")],
)
@pytest.mark.timeout(400)
def test_kernels_compile_and_fit(architecture, dims, tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "tools.bench.compile_gpu"]
    options = ["--architectures", architecture, "--dtypes", "bfloat16", "--dims", dims]
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([*command, *options], cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 19
