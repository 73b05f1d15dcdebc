"""The kernels as older CPUs than this one get them: the tests of any product and of attention run once more, without newer instructions."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from llvmlite.binding import get_host_cpu_features

from tests.conftest import ROOT

TESTS = ("test_any_rows.py", "test_kernels.py")
NEEDED, NEWER = {"avx2": "avx2", "avx512": "avx512f"}, {"avx2": "avx512f", "avx512": "avx512bf16"}
VECTORS = {"avx2": 7, "avx512": 27}
"""What `HELD` must be, so that it is seen that the newer instructions were hidden."""


@pytest.mark.slow
@pytest.mark.parametrize("cpu", ["avx2", "avx512"])
def test_kernels_without_newer_instructions(cpu, tmp_path):
    features = get_host_cpu_features()
    if not (features.get(NEEDED[cpu]) and features.get(NEWER[cpu])):
        pytest.skip("this machine is no newer than that")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "tests.engine.older_cpu"),
            *(f"tests/engine/{name}" for name in TESTS),
        ],
        cwd=ROOT,
        env=os.environ | {"OLDER_CPU": cpu, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = int(done.stdout.splitlines()[-1].partition(f" passed with {VECTORS[cpu]} vectors, dot products: False")[0])
    assert passed > 100
