"""The Triton kernel against dense attention in float32."""

from __future__ import annotations

import pytest
import torch

from engine.attention import Options
from engine.batch import ForwardBatch, SequenceSlice
from engine.gpu import paged_attention
from engine.gpu.attention import DeviceAttention, DeviceKVCache
from engine.shapes import AttentionSpec

pytestmark = pytest.mark.smoke

SHAPES = {  # heads, KV heads, key dim, value dim, context lengths, new tokens, block size
    "decode": (8, 2, 64, 64, (70, 17, 1), (1, 1, 1), 16),
    "odd group": (14, 2, 32, 32, (40, 33), (1, 1), 16),
    "prefill": (4, 4, 16, 16, (37,), (37,), 4),
    "chunks and decode": (6, 3, 24, 24, (50, 9, 90), (7, 9, 1), 8),
    "other value width": (4, 2, 24, 40, (30, 5), (5, 1), 16),
    "long chunk": (4, 1, 32, 32, (150,), (150,), 16),
}
OPTIONS = {"plain": {}, "window": {"window": 13}, "soft-cap": {"softcap": 5.0}, "sinks": {"sinks": True, "window": 16}}


class Case:
    """New tokens of some sequences whose earlier ones stand in a cache, in blocks in any order."""

    def __init__(self, shape, dtype: torch.dtype, device: torch.device, window: int | None = None) -> None:
        self.window = window
        self.heads, self.kv, self.dim, self.value_dim, self.lengths, self.counts, size = shape
        generator = torch.Generator().manual_seed(0)

        def random(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=generator).to(dtype)

        blocks = [-(-length // size) for length in self.lengths]
        order = (torch.randperm(sum(blocks), generator=generator) + 1).split(blocks)
        self.tables = [part.tolist() for part in order]
        spec = AttentionSpec(self.heads, self.kv, self.dim, self.value_dim, None, window, True)
        self.cache = DeviceKVCache([spec], sum(blocks) + 1, size, dtype, device)
        self.keys = [random(n, self.kv, self.dim) for n in self.lengths]
        self.values = [random(n, self.kv, self.value_dim) for n in self.lengths]
        self.query = random(self.heads, sum(self.counts), self.dim)
        slots, row, self.slices = [], 0, []
        for table, length, count, key, value in zip(
            self.tables, self.lengths, self.counts, self.keys, self.values, strict=True
        ):
            all_slots = torch.tensor([table[p // size] * size + p % size for p in range(length)])
            before = all_slots[: length - count].to(device)
            self.cache.keys[0].view(-1, self.kv, self.dim)[before] = key[: length - count].to(device)
            self.cache.values[0].view(-1, self.kv, self.value_dim)[before] = value[: length - count].to(device)
            slots.append(all_slots[length - count :])
            self.slices.append(SequenceSlice(row, count, length, table))
            row += count
        self.slots, self.device = torch.cat(slots), device

    def run(self, options: Options) -> torch.Tensor:
        nothing = torch.zeros(0, dtype=torch.int64)
        batch = ForwardBatch(nothing, nothing, self.slots, self.slices, nothing, [], {}, [])
        new = [
            torch.cat([part[n - c :] for part, n, c in zip(parts, self.lengths, self.counts, strict=True)])
            for parts in (self.keys, self.values)
        ]
        key, value = (part.transpose(0, 1).to(self.device) for part in new)
        step = DeviceAttention(self.cache, batch, self.device)
        return step.attend(0, self.query.to(self.device), key, value, options).float().cpu()

    def reference(self, options: Options) -> torch.Tensor:
        outs, row = [], 0
        for length, count, key, value in zip(self.lengths, self.counts, self.keys, self.values, strict=True):
            query = self.query[:, row : row + count].float()
            k, v = (p.float().transpose(0, 1).repeat_interleave(self.heads // self.kv, 0) for p in (key, value))
            scores = query @ k.transpose(1, 2) * self.dim**-0.5
            if options.softcap:
                scores = options.softcap * torch.tanh(scores / options.softcap)
            rows, columns = torch.arange(length - count, length)[:, None], torch.arange(length)[None]
            keep = (columns <= rows) & (columns > rows - (self.window or length))
            scores = scores.masked_fill(~keep, -torch.inf)
            if options.sinks is not None:
                sink = options.sinks.float().cpu()[:, None, None].expand(-1, count, 1)
                scores = torch.cat([scores, sink], -1)
            outs.append((scores.softmax(-1)[..., :length] @ v).transpose(0, 1))
            row += count
        return torch.cat(outs)


def options_of(name: str, heads: int, device: torch.device) -> Options:
    given = OPTIONS[name]
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(1)).to(device) if "sinks" in given else None
    return Options(None, given.get("softcap"), sinks)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_dense_attention(shape, name, device):
    case = Case(SHAPES[shape], torch.float32, device, OPTIONS[name].get("window"))
    options = options_of(name, case.heads, device)
    expected = case.reference(options)
    assert float((case.run(options) - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize("name", OPTIONS)
def test_contexts_in_pieces(name, device, monkeypatch):
    """Pieces of 64 keys instead of 256, so that short contexts have several."""
    monkeypatch.setattr(paged_attention, "SPLIT_KEYS", 64)
    shape = (8, 2, 32, 32, (300, 64, 65, 1), (1, 1, 1, 1), 16)
    case = Case(shape, torch.float32, device, OPTIONS[name].get("window"))
    options = options_of(name, case.heads, device)
    expected = case.reference(options)
    assert float((case.run(options) - expected).abs().max() / expected.abs().max()) < 1e-5


def test_half_precision(device):
    # The interpreter multiplies bfloat16 as if it were integers.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    case = Case(SHAPES["chunks and decode"], dtype, device)
    options = options_of("plain", case.heads, device)
    expected = case.reference(options)
    assert float((case.run(options) - expected).abs().max() / expected.abs().max()) < 2e-2


def test_a_sequence_is_the_same_alone_and_among_others(device):
    shape = SHAPES["chunks and decode"]
    options = options_of("plain", shape[0], device)
    together, row = Case(shape, torch.float32, device), 0
    whole = together.run(options)
    for slot in together.slices:
        alone = Case(shape, torch.float32, device)
        alone.run(options)  # fills the cache
        step = torch.tensor([0])
        batch = ForwardBatch(step, step, alone.slots[slot.row : slot.row + slot.count],
                             [SequenceSlice(0, slot.count, slot.length, slot.blocks)], step, [], {}, [])  # fmt: skip
        size = alone.cache.block_size
        index = alone.slots[slot.row : slot.row + slot.count]
        key, value = (c[0][index // size, index % size].transpose(0, 1) for c in (alone.cache.keys, alone.cache.values))
        part = DeviceAttention(alone.cache, batch, device).attend(
            0, alone.query[:, slot.row : slot.row + slot.count].to(device), key, value, options
        )
        assert torch.equal(part.float().cpu(), whole[row : row + slot.count])
        row += slot.count
