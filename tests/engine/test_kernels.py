"""The kernels against the same in torch, over odd sizes; and every row's result, bit by bit, whatever stands beside it."""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from engine.cpu.kernels import amx, ops, paged
from engine.cpu.kernels.amx import has_tiles
from engine.cpu.kernels.emit import DOT_PAIRS, WIDE_PAIRS, has_bf16_dot
from engine.cpu.kernels.threads import set_num_threads
from engine.cpu.kv_cache import whole_vectors
from engine.cpu.layers import PanelLinear, make_gate, make_linear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def assert_near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, tolerance: float = 0.0) -> None:
    difference = float((found.float() - expected).abs().max() / expected.abs().max())
    assert difference < max(TOLERANCE[dtype], tolerance)


@dataclass
class Attention:
    """Sequences in a cache whose blocks lie in any order, and new tokens at their ends."""

    heads: int
    kv_heads: int
    dim: int
    lengths: list[int]
    counts: list[int]
    block_size: int
    dtype: torch.dtype

    def __post_init__(self):
        generator = torch.Generator().manual_seed(0)
        kv, size = self.kv_heads, self.block_size
        blocks = [-(-length // size) for length in self.lengths]
        order = torch.randperm(sum(blocks), generator=generator) + 1
        self.tables = [part.tolist() for part in order.split(blocks)]
        shape = (sum(blocks) + 1, kv)
        self.keys = torch.full((*shape, self.dim, whole_vectors(size)), torch.nan, dtype=self.dtype)
        self.values = torch.full((*shape, size, whole_vectors(self.dim)), torch.nan, dtype=self.dtype)
        self.made = [
            [torch.randn(n, kv, self.dim, generator=generator).to(self.dtype) for n in self.lengths] for _ in range(2)
        ]
        for table, key, value in zip(self.tables, *self.made, strict=True):
            slots = torch.tensor([table[p // size] * size + p % size for p in range(len(key))])
            paged.write_kv(key.transpose(0, 1), value.transpose(0, 1), slots, self.keys, self.values)
        self.query = torch.randn(sum(self.counts), self.heads, self.dim, generator=generator).to(self.dtype)

    def run(self, only: int | None = None, **options) -> torch.Tensor:
        """All sequences' attention, or only one's."""
        starts = [sum(self.counts[:i]) for i in range(len(self.counts))]
        every = list(zip(starts, self.counts, self.lengths, self.tables, strict=True))
        chosen = every if only is None else [every[only]]
        plan = paged.AttentionPlan(chosen, self.block_size, self.keys.shape[3], len(self.query), len(self.keys))
        out = torch.empty(len(self.query), self.heads, self.dim, dtype=self.dtype)
        given = {"scale": None, "window": None, "softcap": None, "sinks": None} | options
        paged.attend(plan, self.query.transpose(0, 1), self.keys, self.values, out, **given)
        return out if only is None else out[starts[only] : starts[only] + self.counts[only]]

    def reference(self, window=None, softcap=None, sinks=None) -> torch.Tensor:
        """The same by plain matrix products in float32."""
        outs, start = [], 0
        for i, (count, length) in enumerate(zip(self.counts, self.lengths, strict=True)):
            query = self.query[start : start + count].float().transpose(0, 1)
            key, value = (
                part[i].float().transpose(0, 1).repeat_interleave(self.heads // self.kv_heads, 0) for part in self.made
            )
            scores = query @ key.transpose(1, 2) * self.dim**-0.5
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            rows, columns = torch.arange(length - count, length)[:, None], torch.arange(length)[None]
            keep = (columns <= rows) & (columns > rows - (window or length))
            scores = scores.masked_fill(~keep, -torch.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks[:, None, None].expand(-1, count, 1)], -1)
            weights = scores.softmax(-1)[..., :length]
            outs.append((weights @ value).transpose(0, 1))
            start += count
        return torch.cat(outs)


SHAPES = [
    (9, 3, 64, [100, 17, 1], [1, 1, 1], 16),
    (14, 2, 64, [77, 40], [5, 1], 32),
    (4, 4, 24, [37], [37], 4),
    (8, 1, 8, [50, 9], [7, 9], 8),
    (40, 2, 128, [200], [3], 16),
    (6, 2, 20, [70, 33], [70, 1], 24),
    (6, 3, 48, [100, 33], [40, 1], 16),
    (4, 2, 96, [130, 5], [130, 5], 48),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(shape, dtype):
    case = Attention(*shape, dtype)
    sinks = torch.randn(case.heads, generator=torch.Generator().manual_seed(1))
    for options in ({}, {"window": 13}, {"softcap": 5.0}, {"window": 16, "sinks": sinks}):
        assert_near(case.run(**options), case.reference(**options), dtype)


@pytest.mark.skipif(not has_tiles(), reason="this CPU has no AMX")
@pytest.mark.parametrize("options", [{}, {"window": 20}, {"softcap": 5.0}, {"scale": -0.1}], ids=str)
def test_attention_in_tiles_agrees_with_vectors(options, monkeypatch):
    case = Attention(9, 3, 64, [100, 333, 7], [1, 40, 7], 16, torch.bfloat16)
    tiles = case.run(**options)
    monkeypatch.setattr(paged, "has_tiles", lambda: False)
    assert_near(tiles, case.run(**options).float(), torch.bfloat16)


def test_a_sequence_attends_the_same_alone_and_among_others():
    case = Attention(9, 3, 64, [100, 17, 333], [1, 17, 40], 16, torch.bfloat16)
    together = case.run()
    parts = [case.run(only=i) for i in range(3)]
    assert torch.equal(together, torch.cat(parts))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("size", [16, 40, 200])
def test_many_tokens_over_several_spans_attend_as_each_alone(size, heads, dtype):
    agrees_with_each_alone(Attention(heads, 2, 32, [700, 530, 300], [90, 500, 7], size, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [7, 16, 256])
def test_long_contexts_have_small_tasks_and_attend_the_same(size, dtype):
    rounding = 5e-6  # of sums over thousands of keys in float32
    agrees_with_each_alone(Attention(3, 1, 16, [9000, 6000], [30, 14], size, dtype), rounding)


def agrees_with_each_alone(case: Attention, tolerance: float = 0.0) -> None:
    """Prompts have the reference's results, and the bits of their tokens one by one."""
    size, dtype, sinks = case.block_size, case.dtype, torch.linspace(-2, 2, case.heads)
    alone, start = [], 0
    for count, length, table in zip(case.counts, case.lengths, case.tables, strict=True):
        for number in range(count):
            seen = length - count + number + 1
            alone.append((start + number, 1, seen, table[: -(-seen // size)]))
        start += count
    plan = paged.AttentionPlan(alone, size, case.keys.shape[3], len(case.query), len(case.keys))
    for options in ({}, {"window": 290}, {"softcap": 5.0, "sinks": sinks}, {"window": 290, "sinks": sinks}):
        together, single = case.run(**options), torch.empty(len(case.query), case.heads, case.dim, dtype=dtype)
        given = {"scale": None, "window": None, "softcap": None, "sinks": None} | options
        paged.attend(plan, case.query.transpose(0, 1), case.keys, case.values, single, **given)
        assert_near(together, case.reference(**options), dtype, tolerance)
        assert torch.equal(together, single)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(32, 96), (80, 48)])
def test_values_may_be_of_another_width_than_keys(key_dim, value_dim, dtype):
    generator = torch.Generator().manual_seed(0)
    length, size, heads = 600, 16, 2
    blocks = -(-length // size)
    query, key = (torch.randn(2, length, key_dim, generator=generator).to(dtype) for _ in range(2))
    value = torch.randn(2, length, value_dim, generator=generator).to(dtype)
    keys, values = (
        torch.zeros(blocks, heads, key_dim, size, dtype=dtype),
        torch.zeros(blocks, heads, size, value_dim, dtype=dtype),
    )
    paged.write_kv(key, value, torch.arange(length), keys, values)
    plan = paged.AttentionPlan([(0, length, length, range(blocks))], size, size, length, blocks)
    out = torch.empty(length, heads, value_dim, dtype=dtype)
    paged.attend(plan, query, keys, values, out, None, None, None, None)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.float(), key.float(), value.float(), is_causal=True
    )
    assert_near(out, expected.transpose(0, 1), dtype)


LINEARS = [(64, 96), (576, 960), (8, 5), (30, 33), (2, 1), (258, 1000)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inner", "columns"), LINEARS)
def test_linear(inner, columns, dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(columns, inner, generator=generator).to(dtype)
    bias = torch.randn(columns, generator=generator).to(dtype)
    for b in (None, bias):
        layer = make_linear(weight, b, [])
        for rows in (1, 2, 12, 13, 61, 140):
            x = torch.randn(rows, inner, generator=generator).to(dtype)
            expected = F.linear(x.float(), weight.float(), None if b is None else b.float())
            assert_near(layer(x), expected, dtype)
            assert_near(layer.rows(x), expected, dtype)
    assert layer(torch.zeros(2, 3, inner, dtype=dtype)).shape == (2, 3, columns)
    assert layer(torch.zeros(0, inner, dtype=dtype)).shape == (0, columns)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_multiplied_the_same_alone_and_among_others(dtype):
    x, weight = torch.randn(100, 320).to(dtype), torch.randn(640, 320).to(dtype)
    layer = PanelLinear(weight, None, [])
    together = layer(x)
    assert all(torch.equal(layer(x[i : i + 1])[0], together[i]) for i in range(100))


@pytest.mark.skipif(not has_tiles(), reason="this CPU has no AMX")
@pytest.mark.parametrize("rows", [1, 16, 17, 32, 33, 300])
@pytest.mark.parametrize("inner", [30, 64, 338])
def test_tiles_agree_with_vectors(rows, inner, monkeypatch):
    """Few rows and many, inputs that fill no tile; bytes are summed exactly, so their bits are equal."""
    x, weight, bias = torch.randn(rows, inner).bfloat16(), torch.randn(75, inner).bfloat16(), torch.randn(75).bfloat16()
    small = torch.randn(rows, 80).bfloat16(), torch.randn(75, 80)
    found = []
    for tiled in (True, False):
        monkeypatch.setattr(ops, "has_tiles", lambda tiled=tiled: tiled)
        layer, gate = PanelLinear(weight, bias, []), make_gate(weight[:40], weight[30:70], [])
        residual = torch.ones(rows, layer.width)
        layer.add_to(residual, x)
        gated = gate.rows(x, torch.empty(rows, gate.width, dtype=torch.bfloat16))
        in_bytes = torch.empty(rows, 96, dtype=torch.bfloat16)
        ops.linear_int8(small[0], ops.quantise(small[1]), None, in_bytes)
        found.append([layer(x), layer.logits(x), residual[:, :75], gated, in_bytes])
    for tiles, vectors in zip(*found, strict=True):
        assert_near(tiles, vectors.float(), tiles.dtype)
    assert torch.equal(found[0][-1], found[1][-1])


@pytest.mark.full
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(DOT_PAIRS, marks=pytest.mark.skipif(not has_bf16_dot(), reason="this CPU has none of bfloat16")),
        WIDE_PAIRS,
    ],
    ids=["dot products", "widened"],
)
def test_pairs_are_multiplied_by_dot_products_or_widened(way, monkeypatch):
    """Whichever is faster on this CPU; both give each row the same bits alone and among others."""
    monkeypatch.setattr(ops, "pairing", lambda: way)
    monkeypatch.setattr(ops, "has_tiles", lambda: False)
    monkeypatch.setattr(paged, "has_tiles", lambda: False)
    x, weight = torch.randn(140, 338).bfloat16(), torch.randn(75, 338).bfloat16()
    layer, expected = PanelLinear(weight, None, []), F.linear(x.float(), weight.float())
    for rows in (1, 4, 7, 12, 13, 48, 140):
        found = layer.logits(x[:rows])
        assert_near(found, expected[:rows], torch.float32)
        assert torch.equal(found[-1], layer.logits(x[rows - 1 : rows])[0])
    case = Attention(9, 3, 64, [100, 333, 7], [1, 40, 7], 16, torch.bfloat16)
    for options in ({}, {"window": 13}, {"softcap": 5.0}):
        together = case.run(**options)
        assert_near(together, case.reference(**options), torch.bfloat16)
        assert torch.equal(together, torch.cat([case.run(only=i, **options) for i in range(3)]))


def test_a_denied_permission_leaves_vectors_and_one_line(monkeypatch, caplog):
    class Denied:
        @staticmethod
        def syscall(*_):
            ctypes.set_errno(errno.EPERM)
            return -1

    names = ("amx-tile", "amx-bf16", "amx-int8", "avx512bf16")
    monkeypatch.setattr(amx, "get_host_cpu_features", lambda: dict.fromkeys(names, True))
    monkeypatch.setattr(amx, "on_linux", lambda: True)
    monkeypatch.setattr(amx.ctypes, "CDLL", lambda *_, **__: Denied)
    ask = amx.has_tiles.__wrapped__
    assert not ask()
    assert len(caplog.records) == 1
    assert os.strerror(errno.EPERM) in caplog.text


def test_a_choice_is_a_token_whatever_the_logits_are():
    logits = torch.randn(5, 1736)
    logits[1], logits[2, 4:], logits[3, 7] = -torch.inf, -torch.inf, torch.nan
    logits[4] = torch.nan
    for temperature in (0.0, 1.0):
        for u in (1e-9, 0.5, 1 - 1e-12):
            tokens = ops.choose(logits, [temperature] * 5, [u] * 5)
            assert all(0 <= token < 1736 for token in tokens)
            assert tokens[2] < 4


def test_threads_change_no_bit():
    """Several threads take pieces of work in any order; what comes out is what one thread computes."""
    x, weight = torch.randn(100, 320).bfloat16(), torch.randn(640, 320).bfloat16()
    layer, gate = PanelLinear(weight, None, []), make_gate(weight, weight.flip(0), [])
    attention = Attention(9, 3, 64, [100, 300, 333], [1, 170, 40], 16, torch.bfloat16)
    logits = torch.randn(40, 5000)
    found = []
    try:
        for threads in (1, 2, 4):
            set_num_threads(threads)
            gated = gate.rows(x, torch.empty(100, gate.width, dtype=torch.bfloat16))
            tokens = torch.tensor(ops.choose(logits, [0.0, 1.0] * 20, [0.3] * 40))
            found.append([layer(x), layer.logits(x), gated, attention.run(), tokens])
    finally:
        set_num_threads(1)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [64, 75])
def test_logits_are_not_rounded(columns, dtype):
    x, weight = torch.randn(30, 64).to(dtype), torch.randn(columns, 64).to(dtype)
    assert_near(PanelLinear(weight, None, []).logits(x), x.float() @ weight.float().T, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm(dtype):
    x, weight = torch.randn(50, 224), torch.rand(200) + 0.5
    out = torch.empty(50, 200, dtype=dtype)
    ops.norm(x[:, :200], weight, 1e-5, out)
    assert_near(out, F.rms_norm(x[:, :200], (200,), weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inner", [64, 66])
def test_a_product_is_added_to_the_residual(inner, dtype):
    x, weight, bias = torch.randn(30, inner).to(dtype), torch.randn(40, inner).to(dtype), torch.randn(40).to(dtype)
    residual = torch.randn(30, 64)
    expected = residual[:, :40] + F.linear(x.float(), weight.float(), bias.float())
    PanelLinear(weight, bias, []).add_to(residual, x)
    assert_near(residual[:, :40], expected, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [32, 44])
def test_gated_layer(columns, dtype):
    x, gate, up = torch.randn(30, 64).to(dtype), torch.randn(columns, 64).to(dtype), torch.randn(columns, 64).to(dtype)
    layer = make_gate(gate, up, [])
    expected = F.silu(x.float() @ gate.float().T) * (x.float() @ up.float().T)
    assert_near(layer.rows(x, torch.empty(30, layer.width, dtype=dtype)), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
def test_rotary(dtype, normed):
    heads = torch.randn(30, 7, 24).to(dtype)  # four of queries, two of keys, one of values
    angles = torch.rand(30, 12) * 6
    cosines, sines = (torch.cat([f(angles)] * 2, -1).contiguous() for f in (torch.cos, torch.sin))
    weights = torch.rand(2, 24) + 0.5
    expected = heads.float().clone()
    if normed:
        expected[:, :4] = F.rms_norm(expected[:, :4], (24,), weights[0], 1e-6)
        expected[:, 4:6] = F.rms_norm(expected[:, 4:6], (24,), weights[1], 1e-6)
    turned = expected[:, :6]
    half = torch.cat((-turned[..., 12:], turned[..., :12]), -1)
    expected[:, :6] = turned * cosines[:, None] + half * sines[:, None]
    ops.rotate(heads.view(30, -1), (4, 2), cosines, sines, (weights[0], weights[1], 1e-6) if normed else None)
    assert_near(heads, expected, dtype)
