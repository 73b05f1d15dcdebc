"""The kernels of a decoder layer against the same in torch, and which models run on them."""

from __future__ import annotations

import pytest
import torch

from engine.gpu.fused import FusedDecoder
from engine.gpu.layers import add_norm, gated, rotate_and_store
from tests.gpu.marks import slow
from tests.gpu.test_engine import engine
from tests.models.random_models import make_model

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def random(*sizes: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    difference = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert float(difference) < CLOSE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 100, 896])
def test_norms_of_the_residual(width, dtype, device):
    added = random(5, width, dtype=dtype, device=device)
    residual = random(5, width, dtype=torch.float32, device=device, seed=1)
    weight = random(width, dtype=torch.float32, device=device, seed=2)
    for first in (True, False):
        expected = added.float() + (0 if first else residual)
        own, out = residual.clone(), torch.full_like(added, torch.nan)
        if first:
            own.fill_(torch.nan)
        add_norm(own, added, weight, 1e-5, out, first)
        assert_close(own, expected, torch.float32)
        assert_close(out, torch.nn.functional.rms_norm(expected, (width,), weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim"), [((4, 2), 64), ((14, 2), 24), ((3, 3), 6), ((9, 3), 128)])
@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
def test_rotation_and_the_places_of_keys_and_values(heads, dim, norms, dtype, device):
    queries, kv = heads
    rows, block = 5, 4
    qkv = random(rows, (queries + 2 * kv) * dim, dtype=dtype, device=device)
    angles = random(rows, dim // 2, dtype=torch.float32, device=device, seed=1).repeat(1, 2)
    cosines, sines = angles.cos(), angles.sin()
    slots = torch.tensor([17, 3, 8, 0, 21], device=device)
    keys = torch.full((6, block, kv, dim), 7.0, dtype=dtype, device=device)
    values = keys.clone()
    weights = [random(dim, dtype=torch.float32, device=device, seed=3 + n) for n in range(2)]
    query, key, value = qkv.double().unflatten(1, (-1, dim)).split([queries, kv, kv], 1)
    if norms:
        query, key = (
            x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w.double()
            for x, w in zip((query, key), weights, strict=True)
        )
    turned = [
        x * cosines.double()[:, None]
        + torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1) * sines.double()[:, None]
        for x in (query, key)
    ]
    rotate_and_store(qkv, heads, cosines, sines, (*weights, 1e-6) if norms else None, slots, keys, values)
    assert_close(qkv.unflatten(1, (-1, dim))[:, :queries], turned[0], dtype)
    assert_close(keys.view(-1, kv, dim)[slots], turned[1], dtype)
    assert torch.equal(values.view(-1, kv, dim)[slots].double(), value)
    others = [slot for slot in range(24) if slot not in slots.tolist()]
    for cache in (keys, values):
        assert (cache.view(-1, kv, dim)[others] == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [48, 1500])
def test_gates(width, dtype, device):
    both = random(3, 2 * width, dtype=dtype, device=device)
    gate, up = both.double().split(width, 1)
    assert_close(gated(both), torch.nn.functional.silu(gate) * up, dtype)


@pytest.mark.parametrize(
    ("family", "fused"),
    [
        ("llama", True),
        slow("qwen2", True),
        slow("mistral", True),
        slow("qwen3", True),
        slow("gpt2", False),
        slow("gemma2", False),
    ],
)
def test_which_models_run_fused(family, fused, models_dir, device):
    """Others run as transformers has them; both with quantized weights too."""
    model = make_model(models_dir, family)
    for quantization in ("none", "int8"):
        core = engine(model, device, quantization=quantization)
        assert isinstance(core.runner.forward, FusedDecoder) == fused
        assert bool(core.runner.backend._layers) == (quantization == "none")
