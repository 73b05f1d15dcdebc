"""The products in AMX tiles on a machine without AMX: its instructions are emulated, and the tests of any product run once more."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from engine.cpu.kernels.amx import has_tiles
from engine.cpu.kernels.emit import has_bf16_dot
from tests.conftest import ROOT

TESTS = ("test_any_rows.py", "test_coded_weights.py", "test_kernels.py", "test_lora_layer.py", "test_int8.py")
ASKED = "tests/engine/test_kernels.py::test_a_denied_permission_leaves_vectors_and_one_line"
"""Left out: what is emulated asks for no permission."""


@pytest.mark.slow
@pytest.mark.skipif(has_tiles(), reason="this machine's tests run in tiles")
@pytest.mark.skipif(
    not has_bf16_dot() or shutil.which("cc") is None, reason="emulation takes AVX512_BF16 and a C compiler"
)
def test_products_in_tiles(tmp_path):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "tests.engine.emulated_tiles",
        "--deselect",
        ASKED,
    ]
    done = subprocess.run(
        [*command, *(f"tests/engine/{name}" for name in TESTS)],
        cwd=ROOT,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert int(done.stdout.rpartition("products of tiles: ")[2]) > 1_000_000
