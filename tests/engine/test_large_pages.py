"""Packed weights and the KV cache lie in memory for which large pages were asked."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from engine.cpu import large_pages
from engine.cpu.kernels import ops
from engine.cpu.kv_cache import KVCache
from engine.cpu.layers import PanelGate, PanelLinear
from engine.quantization.int8 import ByteGate, ByteLinear
from engine.shapes import AttentionSpec

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no large pages")


def mappings() -> dict[tuple[int, int], set[str]]:
    """This process's mappings and their flags (proc(5), smaps)."""
    found, where = {}, (0, 0)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):
            begin, _, end = first.partition("-")
            where = (int(begin, 16), int(end, 16))
        elif first == "VmFlags:":
            found[where] = set(line.split()[1:])
    return found


def flags_at(address: int) -> set[str]:
    """Those of the mapping around an address; none if there is no such mapping."""
    return next((flags for (begin, end), flags in mappings().items() if begin <= address < end), set())


def in_large_pages(tensor: torch.Tensor) -> bool:
    last = tensor.data_ptr() + tensor.numel() * tensor.element_size() - 1
    return {"hg"} <= flags_at(tensor.data_ptr()) & flags_at(last)


def test_weights_and_cache_lie_in_large_pages():
    weight = torch.randn(64, 64)
    cache = KVCache([AttentionSpec(2, 2, 16, 16, 0.25, None, plain=True)] * 2, 4, 16, torch.bfloat16)
    tensors = [
        PanelLinear(weight, None, [("a", 64)]).weight,
        PanelGate(weight, weight, [("a", 64), ("b", 64)]).weight,
        ByteLinear(weight, None).weight.packed,
        ByteGate(weight, weight).weight.packed,
        *cache.keys,
        *cache.values,
    ]
    assert all(in_large_pages(tensor) for tensor in tensors)
    assert not in_large_pages(ops.pack_weight(weight))


def test_tensors_do_not_overlap_and_keep_their_values():
    sources = [torch.randint(0, 100, (rows, 33), dtype=torch.int32) for rows in range(1, 200)]
    copies = [large_pages.moved(source) for source in sources]
    assert all(torch.equal(source, copy) for source, copy in zip(sources, copies, strict=True))
    assert all(copy.is_contiguous() and copy.data_ptr() % large_pages.ALIGNMENT == 0 for copy in copies)


def test_new_memory_is_zero():
    large_pages.empty((1000,), torch.uint8).fill_(255)
    assert not large_pages.empty((1000,), torch.uint8).any()


def large_bytes() -> int:
    return sum(end - begin for (begin, end), flags in mappings().items() if "hg" in flags)


def test_memory_is_returned_with_the_last_tensor():
    small = [large_pages.empty((large_pages.CHUNK_BYTES // 2 + 1,), torch.uint8) for _ in range(8)]
    large = large_pages.empty((large_pages.CHUNK_BYTES // 4,), torch.float32)
    assert large.data_ptr() % large_pages.PAGE_BYTES == 0
    assert in_large_pages(large)
    before = large_bytes()
    del large
    assert before - large_bytes() >= large_pages.CHUNK_BYTES
    del small
    # The first may lie in a mapping that others use, and what is left of the last one stays for the next small tensor.
    assert before - large_bytes() >= 7 * large_pages.CHUNK_BYTES
