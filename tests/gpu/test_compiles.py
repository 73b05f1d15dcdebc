"""The device kernels compile for real architectures, which Triton's interpreter does not show, and fit into their shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.conftest import ROOT

KERNELS = 17
"""With heads of one width."""


@pytest.mark.parametrize(
    ("architectures", "dims"),
    [
        pytest.param(["80", "90", "100"], "64", id="A100, H100 and B200", marks=pytest.mark.smoke),
        pytest.param(["89"], "256", id="wide heads and little memory"),
    ],
)
@pytest.mark.timeout(400)
def test_kernels_compile_and_fit(architectures, dims, tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "tools.gpu.compiled", "--architectures", *architectures]
    options = ["--dtypes", "bfloat16", "--dims", dims]
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([*command, *options], cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()[2:]
    assert Counter(row.split(" | ")[0] for row in rows) == {f"| {each}": KERNELS for each in architectures}
