"""Compiled kernels in their cache directory."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from numba.core import config

from engine.cpu.kernels import compiled
from engine.cpu.kernels.simd import address_of, store_int


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
