"""What adapters add to one packed layer, against dense float32 arithmetic, for parts and ranks of every kind."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine.adapters.failures import AdapterError
from engine.adapters.peft import Adapter, LoraWeights
from engine.cpu.kernels.threads import set_num_threads
from engine.cpu.layers import PanelGate, PanelLinear
from engine.cpu.lora import adapters_of
from tests.engine.test_kernels import DTYPES, assert_near

RUNS = ((1, 1, "a"), (2, 5, "b"), (9, 50, "a"), (59, 3, "c"))
ROWS = 63


def adapter(parts, inner: int, ranks, generator) -> Adapter:
    def weights(out: int, rank: int) -> LoraWeights:
        a, b = torch.randn(rank, inner, generator=generator) * 0.3, torch.randn(out, rank, generator=generator) * 0.3
        return LoraWeights(a, b, None)

    return Adapter(
        {path: weights(out, rank) for (path, out), rank in zip(parts, ranks, strict=True) if rank is not None}
    )


def expected_of(x, weight, parts, adapters, dtype):
    out = F.linear(x.float(), weight.float())
    for first, count, digest in RUNS:
        row = 0
        for path, size in parts:
            found = adapters[digest].modules.get(path)
            if found is not None:
                low = F.linear(x[first : first + count].float(), found.a.to(dtype).float()).to(dtype).float()
                out[first : first + count, row : row + size] += F.linear(low, found.b.to(dtype).float())
            row += size
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inner", [64, 70])
@pytest.mark.parametrize("sizes", [(48,), (64, 32, 32), (16, 48, 16), (20, 12, 41)], ids=str)
def test_layers_of_several_parts(sizes, inner, dtype):
    generator = torch.Generator().manual_seed(0)
    parts = [(f"p{i}", size) for i, size in enumerate(sizes)]
    weight = torch.randn(sum(sizes), inner, generator=generator).to(dtype)
    layer = PanelLinear(weight, None, parts)
    choices = {"a": [4] * len(sizes), "b": [None, 3, 17][: len(sizes)], "c": [21, None, 1][: len(sizes)]}
    adapters = {name: adapter(parts, inner, ranks, generator) for name, ranks in choices.items()}
    for name, one in adapters.items():
        layer.lora.put(name, layer.lora.make(one))
    x = torch.randn(ROWS, inner, generator=generator).to(dtype)
    with adapters_of(RUNS, ROWS):
        assert_near(layer.rows(x), expected_of(x, weight, parts, adapters, dtype), dtype)
        together = layer.rows(x)
    with adapters_of(((0, 1, "a"),), 1):  # bit by bit what it is among others
        assert torch.equal(layer.rows(x[20:21])[0], together[20])
    with adapters_of((), ROWS):
        assert_near(layer.rows(x), F.linear(x.float(), weight.float()), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [32, 44])
def test_gated_layers(size, dtype):
    generator = torch.Generator().manual_seed(1)
    parts = [("gate", size), ("up", size)]
    weight = (torch.randn(2 * size, 64, generator=generator) * 0.3).to(dtype)
    layer = PanelGate(*weight.split(size), parts)
    choices = {"a": [8, 8], "b": [None, 5], "c": [3, 9]}
    adapters = {name: adapter(parts, 64, ranks, generator) for name, ranks in choices.items()}
    for name, one in adapters.items():
        layer.lora.put(name, layer.lora.make(one))
    x = torch.randn(ROWS, 64, generator=generator).to(dtype)
    gate, up = expected_of(x, weight, parts, adapters, dtype).split(size, 1)
    with adapters_of(RUNS, ROWS):
        out = layer.rows(x, torch.empty(ROWS, layer.width, dtype=dtype))
    assert_near(out, F.silu(gate) * up, dtype)


def test_threads_change_no_bit():
    generator = torch.Generator().manual_seed(2)
    parts = [("q", 320), ("k", 64)]
    layer = PanelLinear(torch.randn(384, 320, generator=generator).bfloat16(), None, parts)
    for name, rank in (("a", 16), ("b", 40), ("c", 5)):
        layer.lora.put(name, layer.lora.make(adapter(parts, 320, [rank, rank], generator)))
    x = torch.randn(ROWS, 320, generator=generator).bfloat16()
    found: list[torch.Tensor] = []
    try:
        for threads in (1, 2, 4):
            set_num_threads(threads)
            with adapters_of(RUNS, ROWS):
                found += [layer.rows(x) for _ in range(20)]
    finally:
        set_num_threads(1)
    assert all(torch.equal(found[0], other) for other in found)


def test_rows_without_an_adapter_are_segments_too():
    generator = torch.Generator().manual_seed(3)
    layer = PanelLinear(torch.randn(64, 64, generator=generator), None, [("p", 64)])
    for name, path in (("a", "p"), ("b", "elsewhere")):
        layer.lora.put(name, layer.lora.make(adapter([(path, 64)], 64, [8], generator)))
    with adapters_of(((1, 2, "a"), (4, 1, "b")), 6):
        segments = layer.lora.segments(6).segments.tolist()
    assert [row[:2] for row in segments] == [[0, 1], [1, 2], [3, 1], [4, 1], [5, 1]]
    assert [row[3] > 0 for row in segments] == [False, True, False, False, False]
    with adapters_of(((4, 1, "b"),), 6):
        assert layer.lora.segments(6) is None
    layer.lora.drop("a")
    with adapters_of(((1, 2, "a"), (4, 1, "b")), 6):
        assert layer.lora.segments(6) is None


class OnTheCpu:
    """A layer named "p" of the CPU's backend."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.layer = PanelLinear(weight, bias, [("p", len(weight))])
        self.make = self.layer.lora.make

    def applied(self, one: Adapter, x: torch.Tensor) -> torch.Tensor:
        """The output with the adapter for all rows."""
        self.layer.lora.put("a", self.make(one))
        with adapters_of(((0, len(x), "a"),), len(x)):
            return self.layer.rows(x)


class OnAGpu:
    """The same of the GPU's backend, with its tensors on the host."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        lora = pytest.importorskip("engine.gpu.lora", reason="triton is not installed")
        base = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
        base.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
        self.layer = lora.SlotLinear(base, [("p", len(weight))], lora.Slots(1, 4, torch.device("cpu")))
        self.make = self.layer.make

    @torch.inference_mode()
    def applied(self, one: Adapter, x: torch.Tensor) -> torch.Tensor:
        self.layer.put("a", self.make(one))
        self.layer.slots.begin_step(((0, len(x), "a"),), len(x))
        return self.layer(x)


@pytest.mark.parametrize("device", [OnTheCpu, OnAGpu])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_magnitude_of_zero_leaves_the_bias(device, dtype):
    """As in PEFT."""
    generator = torch.Generator().manual_seed(3)
    weight, bias = torch.randn(48, 64, generator=generator).to(dtype), torch.randn(48, generator=generator).to(dtype)
    a, b = torch.randn(4, 64, generator=generator) * 0.3, torch.randn(48, 4, generator=generator) * 0.3
    magnitude = torch.randn(48, generator=generator).abs() + 5
    magnitude[::3], magnitude[1::3] = 0.0, 1e-38
    x = torch.randn(5, 64, generator=generator).to(dtype)
    found = device(weight, bias).applied(Adapter({"p": LoraWeights(a, b, magnitude)}), x).float()
    combined = weight.float() + b @ a
    expected = F.linear(x.float(), combined) * (magnitude / combined.norm(dim=1)) + bias.float()
    assert_near(found, expected, dtype)
    assert_near(found[:, ::3], bias[::3].float().expand(5, -1), dtype)


@pytest.mark.parametrize("device", [OnTheCpu, OnAGpu])
@pytest.mark.parametrize("magnitude", [0.0, 1.0])
def test_a_magnitude_of_a_row_of_zeros_is_refused(device, magnitude):
    """PEFT computes no number of it."""
    weight = torch.ones(48, 64)
    weight[7] = 0
    scaled = LoraWeights(torch.ones(2, 64), torch.zeros(48, 2), torch.full((48,), magnitude))
    with pytest.raises(AdapterError, match=r"p: .* a row of zeros"):
        device(weight).make(Adapter({"p": scaled}))


@torch.inference_mode()
def test_another_slots_infinities_do_not_matter():
    """On a device the products are those with all slots."""
    lora = pytest.importorskip("engine.gpu.lora", reason="triton is not installed")
    generator = torch.Generator().manual_seed(4)
    layer = lora.SlotLinear(nn.Linear(64, 48), [("p", 48)], lora.Slots(2, 4, torch.device("cpu")))
    x = torch.randn(5, 64, generator=generator) * 10
    calm = Adapter({"p": LoraWeights(torch.randn(4, 64, generator=generator), torch.ones(48, 4), None)})
    layer.put("calm", layer.make(calm))
    layer.slots.begin_step(((0, 3, "calm"),), len(x))
    expected = layer(x)
    layer.put("wild", layer.make(Adapter({"p": LoraWeights(torch.full((4, 64), 3e38), torch.ones(48, 4), None)})))
    layer.slots.begin_step(((0, 3, "calm"),), len(x))
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("device", [OnTheCpu, OnAGpu])
@pytest.mark.parametrize("where", ["a", "b"])
def test_a_weight_beyond_the_models_type_is_refused(device, where):
    weights = {"a": torch.ones(4, 64), "b": torch.ones(48, 4)}
    weights[where] *= 1e6
    with pytest.raises(AdapterError, match="p: a weight is not a finite number"):
        device(torch.ones(48, 64, dtype=torch.float16)).make(
            Adapter({"p": LoraWeights(weights["a"], weights["b"], None)})
        )
