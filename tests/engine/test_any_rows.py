"""The bits of a row in products and attention, whatever number of rows is computed at once and in whichever pieces."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.cpu.kernels import ops, paged
from engine.cpu.kernels.int8 import has_int8_dot
from engine.cpu.kernels.threads import set_num_threads
from engine.cpu.layers import PanelGate, PanelLinear
from engine.cpu.lora import adapters_of
from tests.engine.test_kernels import Attention, assert_near
from tests.engine.test_lora_layer import adapter

ROWS = 801
NUMBERS = (1, 11, 12, 15, 16, 17, 23, 33, 47, 48, 49, 63, 64, 65, 97, 144, 250, 450, ROWS)
"""Numbers of rows at both sides of a tile, of a block of three, and of what workers share out."""
LENGTH = 700
ENDS = (1, 15, 16, 17, 255, 256, 257, 300, 512, 513, 530, LENGTH)


@pytest.fixture(autouse=True, params=[1, 2], ids=["1 thread", "2 threads"])
def _threads(request):
    torch.manual_seed(0)
    set_num_threads(request.param)
    yield
    set_num_threads(1)


LONG = 6202
"""Inputs of a sum that is made in parts where there are several tiles of rows."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("inner", [338, 896, 1700, LONG])
def test_products(inner, dtype):
    """Some sums fill no whole step; those of float32 have an odd number of inputs too."""
    inner += dtype == torch.float32 and inner == LONG
    x, weight, bias = torch.randn(ROWS, inner).to(dtype), torch.randn(168, inner).to(dtype), torch.randn(168)
    layer, gate = PanelLinear(weight, bias, []), PanelGate(*weight.split(84), [])
    expected = F.linear(x.float(), weight.float(), bias)

    def results(rows: int) -> list[torch.Tensor]:
        residual, gated = torch.ones(rows, layer.width), torch.empty(rows, gate.width, dtype=dtype)
        layer.add_to(residual, x[:rows])
        return [layer.logits(x[:rows]), layer.rows(x[:rows]), gate.rows(x[:rows], gated), residual[:, :168]]

    whole = results(ROWS)
    rounding = 1e-9 * inner if dtype == torch.float32 else 0.0  # products of bfloat16 are exact, sums alone are rounded
    assert_near(whole[0], expected, torch.float32, rounding)
    assert_near(whole[3], expected + 1, torch.float32, rounding)
    for rows in NUMBERS:
        assert all(torch.equal(few, many[:rows]) for few, many in zip(results(rows), whole, strict=True))


def test_products_of_many_panels():
    """Panels that are shared out in several groups, of which the last is smaller."""
    x, weight = torch.randn(ROWS, 1300).bfloat16(), torch.randn(1240, 1300).bfloat16()
    layer = PanelLinear(weight, None, [])
    whole = layer.logits(x)
    assert_near(whole, F.linear(x.float(), weight.float()), torch.float32)
    for rows in NUMBERS:
        assert torch.equal(layer.logits(x[:rows]), whole[:rows])


@pytest.mark.skipif(not has_int8_dot(), reason="this CPU has no products of bytes")
@pytest.mark.parametrize(("inner", "outputs"), [(336, 192), (4112, 192), (336, 1248)])
def test_products_of_bytes(inner, outputs):
    x, bias = torch.randn(ROWS, inner).bfloat16(), torch.randn(outputs)
    weight = ops.quantise(torch.randn(outputs - 24, inner))

    def result(rows: int) -> torch.Tensor:
        out = torch.empty(rows, outputs, dtype=torch.bfloat16)
        ops.linear_int8(x[:rows], weight, bias, out)
        return out

    whole = result(ROWS)
    assert all(torch.equal(result(rows), whole[:rows]) for rows in NUMBERS)


@pytest.mark.parametrize("inner", [338, LONG])
def test_adapters(inner):
    """Each row has the bits that it has alone with its adapter."""
    parts, generator = [("q", 96), ("k", 48), ("v", 24)], torch.Generator().manual_seed(0)
    weight = torch.randn(168, inner, generator=generator).bfloat16()
    layer, plain = PanelLinear(weight, None, parts), PanelLinear(weight, None, [])
    for name, ranks in {"a": [16, 16, 16], "b": [None, 3, 40], "c": [8, None, 70]}.items():
        layer.lora.put(name, layer.lora.make(adapter(parts, inner, ranks, generator)))
    x = torch.randn(ROWS, inner, generator=generator).bfloat16()
    for rows, runs in (
        (33, ((0, 2, "a"), (2, 1, "b"), (5, 20, "c"), (25, 8, "a"))),
        (113, ((0, 60, "a"), (61, 30, "b"), (91, 22, "c"))),
        (ROWS, ((0, 300, "a"), (301, 70, "b"), (371, 5, "c"), (380, ROWS - 380, "a"))),
    ):
        names = {row: name for first, count, name in runs for row in range(first, first + count)}
        with adapters_of(runs, rows):
            together = layer.rows(x[:rows])
        for row in {0, 1, 2, 4, 5, 24, 32, *range(0, rows, 37), rows - 1}:
            own = ((0, 1, names[row]),) if row in names else ()
            with adapters_of(own, 1):
                assert torch.equal(layer.rows(x[row : row + 1])[0], together[row])
            if not own:
                assert torch.equal(together[row], plain.rows(x[row : row + 1])[0])


@pytest.mark.parametrize("options", [{}, {"window": 40}, {"window": 300}, {"softcap": 5.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("size", [16, 48])
def test_attention(size, options):
    """A prompt at once, its last tokens one by one, and pieces of it."""
    if "sinks" in options:
        options = {"sinks": torch.randn(6)}
    case = Attention(6, 2, 64, [LENGTH], [LENGTH], size, torch.bfloat16)

    def attend(first: int, end: int) -> torch.Tensor:
        blocks = case.tables[0][: -(-end // size)]
        plan = paged.AttentionPlan(
            [(0, end - first, end, blocks)], size, case.keys.shape[3], end - first, len(case.keys)
        )
        out = torch.empty(end - first, 6, 64, dtype=torch.bfloat16)
        given = {"scale": None, "window": None, "softcap": None, "sinks": None} | options
        paged.attend(plan, case.query[first:end].transpose(0, 1), case.keys, case.values, out, **given)
        return out

    whole = attend(0, LENGTH)
    assert_near(whole, case.reference(**options), torch.bfloat16)
    for first, end in [(end - 1, end) for end in ENDS] + [(0, 100), (100, 355), (355, 522), (522, LENGTH)]:
        assert torch.equal(attend(first, end), whole[first:end])
