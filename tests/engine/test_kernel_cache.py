"""Compiled kernels in their cache directory."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import numpy as np
import pytest
from numba.core import config

from engine.cpu.kernels import compiled
from engine.cpu.kernels.simd import address_of, store_int
from tests.conftest import ROOT

pytestmark = pytest.mark.full

ATTENTION = """
import hashlib, torch
from engine.cpu.kernels import paged
keys, values, query, out = torch.randn(7, 1, 16, 16), torch.randn(7, 1, 16, 16), torch.randn(2, 100, 16), torch.empty(100, 2, 16)
paged.attend(paged.AttentionPlan([(0, 100, 100, range(7))], 16, 16, 100, 7), query, keys, values, out, None, None, None, None)
print(hashlib.sha256(out.numpy().tobytes()).hexdigest())
"""


def doubling(number: int):
    """A kernel with a constant: it writes that number's double."""
    double = 2 * number

    @compiled.kernel
    def write(data) -> None:
        store_int(address_of(data), 0, double)

    return write


def result_of(kernel) -> int:
    memory = np.zeros(1, dtype=np.int64)
    kernel.ctypes(memory.ctypes.data)
    return int(memory[0])


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    return tmp_path


def test_each_kernel_has_an_index_of_its_own(folder):
    """Numba's index has no lock, so that two workers must never write different kernels into one."""
    assert [result_of(doubling(number)) for number in (3, 4, 3)] == [6, 8, 6]
    assert len(list(folder.rglob("*.nbi"))) == len(list(folder.rglob("*.nbc"))) == 2


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize("content", [b"", b"\x80\x04garbage"])
def test_a_damaged_file_costs_a_compilation(folder, caplog, ending, content):
    doubling(3)
    for file in folder.rglob(f"*.{ending}"):
        file.write_bytes(content)
    with caplog.at_level(logging.WARNING, "engine"):
        assert result_of(doubling(3)) == 6
    assert "no cached kernel write" in caplog.text


def test_a_full_disk_costs_a_compilation(folder, monkeypatch, caplog):
    def save(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", save)
    with caplog.at_level(logging.WARNING, "engine"):
        assert result_of(doubling(3)) == 6
    assert "No space left" in caplog.text


def test_a_kernel_gives_the_same_bits_compiled_and_from_the_cache(tmp_path):
    def digest() -> str:
        program = f"import torch; torch.manual_seed(0)\n{ATTENTION}"
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
        return subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env=environment, check=True, capture_output=True, text=True
        ).stdout

    compiled_here = digest()
    assert list(tmp_path.rglob("*.nbc"))
    assert digest() == compiled_here
