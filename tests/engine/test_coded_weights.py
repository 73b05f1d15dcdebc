"""Weights in twelve bits a number: nothing is lost, and products have the bits of those with plain weights."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.cpu import weight_coding
from engine.cpu.kernels import ops
from engine.cpu.kernels.coded import CodedWeight, can_code, decode, encode
from engine.cpu.kernels.emit import DOT_PAIRS, WIDE_PAIRS
from engine.cpu.kernels.int8 import has_int8_dot
from engine.cpu.kernels.threads import set_num_threads
from engine.cpu.kernels.tiles import ADD, GATE, STORE, WIDEN
from engine.cpu.layers import PanelGate, PanelLinear
from engine.cpu.lora import adapters_of
from engine.cpu.weight_coding import coded_weights, worthwhile
from engine.shapes import ShapeError
from tests.conftest import DEMO
from tests.engine.engines import Driver, prompts
from tests.engine.test_lora_layer import adapter

if not can_code():
    pytest.skip("this CPU does not shuffle the bytes of whole registers", allow_module_level=True)

ROWS = (1, 2, 7, 11, 12, 17, 22, 23, 33, 40, 41, 48, 49, 64, 100, 183, 230, 900)
"""At both sides of a tile, of what every tile decodes for itself, and of what workers share out."""


@pytest.fixture(autouse=True)
def _fixed():
    torch.manual_seed(0)
    yield
    set_num_threads(1)


def uneven(outputs: int, inner: int) -> torch.Tensor:
    """Numbers of which a few of a hundred groups have one with a rare exponent."""
    spread = torch.randn(outputs, inner) * (0.6 if inner > 64 else 0.0)
    return (torch.randn(outputs, inner) * spread.exp()).bfloat16()


def kept_groups(coded: CodedWeight) -> int:
    plain = ops.pack_weight(torch.zeros(32 * coded.panels, coded.inner).bfloat16())
    return (coded.packed.numel() - encode(plain).packed.numel()) // 320


def equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.contiguous().view(torch.int16), second.contiguous().view(torch.int16))


def test_nothing_is_lost():
    for weight in (torch.randn(96, 100), torch.randn(64, 896) * 1e-30, torch.zeros(32, 4), uneven(160, 1700)):
        packed = ops.pack_weight(weight.bfloat16())
        assert equal(decode(encode(packed)), packed)
    special = torch.randn(64, 512).bfloat16()
    special[3, 5:9] = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0])
    special.view(torch.int16)[7, 100:103] = torch.tensor([1, -0x7FFF, 0x7FA5])  # smallest numbers, a NaN with a payload
    coded = encode(ops.pack_weight(special))
    assert kept_groups(coded)
    assert equal(decode(coded), ops.pack_weight(special))
    assert equal(ops.unpack_weight(coded, 64), special)


def test_what_is_not_coded():
    """Bits without order, and inputs that fill no group."""
    noise = torch.randint(-(1 << 15), 1 << 15, (64, 512), dtype=torch.int16).view(torch.bfloat16)
    assert encode(ops.pack_weight(noise)) is None
    assert encode(ops.pack_weight(torch.randn(64, 70).bfloat16())) is None
    layer = PanelLinear(torch.randn(64, 70).bfloat16(), None, [], coded=True)
    assert isinstance(layer.weight, torch.Tensor)


def test_a_quarter_less():
    layer = PanelLinear((torch.randn(640, 896) * 0.02).bfloat16(), None, [], coded=True)
    assert layer.weight.packed.numel() < 0.77 * 2 * 640 * 896


@pytest.mark.parametrize(
    "change",
    [
        {"panels": 3},
        {"inner": 68},
        {"inner": 62},
        {"packed": torch.zeros(3, dtype=torch.uint8)},
        {"packed": torch.zeros(9999, dtype=torch.uint8)[1:]},
        {"packed": torch.zeros(9999, dtype=torch.int8)},
    ],
    ids=str,
)
def test_a_weight_that_does_not_fit_is_refused(change):
    coded = encode(ops.pack_weight(torch.randn(64, 64).bfloat16()))
    out = torch.empty(1, 96, dtype=torch.bfloat16)
    with pytest.raises(ShapeError):
        ops.linear(torch.ones(1, 64).bfloat16(), replace(coded, **change), None, out)
    with pytest.raises(ShapeError):
        ops.linear(torch.ones(1, 64), coded, None, out.float())


@pytest.mark.full
@pytest.mark.parametrize(
    ("way", "threads"), [(DOT_PAIRS, 1), (DOT_PAIRS, 2), (WIDE_PAIRS, 2)], ids=["one thread", "dot products", "widened"]
)
@pytest.mark.parametrize(("outputs", "inner"), [(64, 16), (96, 100), (320, 576), (160, 1700), (64, 6200)])
def test_products_have_equal_bits(outputs, inner, way, threads, monkeypatch):
    monkeypatch.setattr(ops, "pairing", lambda: way)
    set_num_threads(threads)
    packed = ops.pack_weight(uneven(outputs, inner))
    coded, bias = encode(packed), torch.randn(outputs)
    assert bool(kept_groups(coded)) == (inner > 64)
    for rows in ROWS:
        x = torch.randn(rows, inner).bfloat16()
        for ending in (STORE, ADD, GATE, WIDEN):
            out = torch.randn(rows, outputs).to(torch.float32 if ending in (ADD, WIDEN) else torch.bfloat16)
            other = out.clone()
            ops.linear(x, packed, bias, out, ending)
            ops.linear(x, coded, bias, other, ending)
            assert torch.equal(out, other), (rows, ending)


@pytest.mark.full
@pytest.mark.parametrize("inner", [580, 6200])
def test_adapters_have_equal_bits(inner):
    parts, generator = [("q", 96), ("k", 48), ("v", 24)], torch.Generator().manual_seed(0)
    weight, sizes = uneven(168, inner), {"a": [16, 16, 16], "b": [None, 3, 40]}
    plain, coded = (PanelLinear(weight, None, parts, coded=way) for way in (False, True))
    gates = [PanelGate(*weight[:160].split(80), [("g", 80), ("u", 80)], coded=way) for way in (False, True)]
    assert isinstance(coded.weight, CodedWeight)
    assert isinstance(gates[1].weight, CodedWeight)
    for name, ranks in sizes.items():
        made = adapter(parts, inner, ranks, generator)
        gated = adapter([("g", 80), ("u", 80)], inner, ranks[1:], generator)
        for layer, module in ((plain, made), (coded, made), (gates[0], gated), (gates[1], gated)):
            layer.lora.put(name, layer.lora.make(module))
    for rows in (9, 31, 300):
        x = torch.randn(rows, inner, generator=generator).bfloat16()
        with adapters_of(((0, 2, "a"), (3, 5, "b"), (8, rows - 8, "a")), rows):
            assert torch.equal(plain.rows(x), coded.rows(x))
            first, second = (gate.rows(x, torch.empty(rows, gate.width, dtype=x.dtype)) for gate in gates)
            assert torch.equal(first, second)
    assert torch.equal(plain.lora.dense(), coded.lora.dense())


@pytest.mark.parametrize(
    "quantization",
    ["none", pytest.param("int8", marks=pytest.mark.skipif(not has_int8_dot(), reason="no products of bytes"))],
)
def test_an_engine_gives_equal_bits(quantization):
    found = []
    for coding in ("on", "off"):
        engine = EngineCore(
            EngineConfig(model=str(DEMO), dtype="bfloat16", quantization=quantization, weight_coding=coding, threads=2)
        )
        assert isinstance(engine.runner.forward.head.weight, CodedWeight) == (coding == "on")
        driver = Driver(engine)
        for number, prompt in enumerate(prompts(engine.info.vocab_size, (90, 3, 40), seed=2)):
            driver.submit(number, prompt, max_tokens=12, logprobs=0, ignore_eos=True)
        driver.run()
        engine.close()
        found.append(
            {
                request: [(t.token_id, t.logprob.hex()) for output in outputs for t in output.logprobs or []]
                for request, outputs in driver.outputs.items()
            }
        )
    assert found[0] == found[1]


def test_models_that_are_never_coded(monkeypatch, caplog):
    monkeypatch.setattr(weight_coding, "worthwhile", lambda: pytest.fail("nothing is to be measured"))
    assert not coded_weights("auto", torch.bfloat16, 1 << 20)
    assert not coded_weights("auto", torch.float32, 1 << 30)
    assert not coded_weights("off", torch.bfloat16, 1 << 30)
    assert coded_weights("on", torch.bfloat16, 1 << 20)
    assert not caplog.records
    assert not coded_weights("on", torch.float32, 1 << 30)
    assert "not coded" in caplog.text


@pytest.mark.parametrize(
    ("parts", "coded"),
    [
        ((0.8, 0.98, 1.05, 1.04), True),
        ((0.8, 0.9, 1.15, 1.04), False),
        ((0.8, 1.02, 0.9, 0.9), False),
        ((0.93, 0.9, 0.9, 0.9), False),
    ],
)
def test_coding_must_pay_at_few_rows_and_cost_little_at_many(parts, coded, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    given = iter(parts)
    monkeypatch.setattr(weight_coding, "COPIES", 1)
    monkeypatch.setattr(weight_coding, "_part_of_time", lambda plain, coded, rows: next(given))
    assert worthwhile.__wrapped__() == coded
    assert f"{parts[1]:.2f} at 8 rows" in caplog.text


def test_both_forms_are_measured(monkeypatch):
    monkeypatch.setattr(weight_coding, "COPIES", 2)
    assert worthwhile.__wrapped__() in (True, False)
