"""Eight-bit weights: the kernel against its own arithmetic in torch, and models that keep saying what they say."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.cpu.kernels import ops
from engine.cpu.kernels.int8 import has_int8_dot
from engine.cpu.kernels.threads import set_num_threads
from engine.messages import AdapterRef
from engine.quantization.int8 import ByteGate, ByteLinear
from tests.conftest import DEMO
from tests.engine.engines import Driver, core, prompts
from tests.engine.test_kernels import DTYPES, assert_near
from tests.models.random_models import make_model

pytestmark = pytest.mark.skipif(not has_int8_dot(), reason="this CPU has no AVX512_VNNI")


def expected_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same roundings, in float64."""
    scales = weight.float().abs().amax(1, keepdim=True) / 127
    steps = (x.float().abs().amax(1, keepdim=True) / 127).clamp_min(1e-30)
    small_x, small_w = (x.float() / steps + 0.5).floor(), (weight.float() / scales).round()
    return (small_x.double() @ small_w.double().T * steps.double() * scales.double().T).float()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("inner", "columns"), [(16, 5), (64, 64), (320, 100)])
def test_layers_agree_with_their_own_roundings(inner, columns, dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(columns, inner, generator=generator).to(dtype)
    bias = torch.randn(columns, generator=generator).to(dtype)
    for rows in (1, 2, 12, 13, 61):
        x = torch.randn(rows, inner, generator=generator).to(dtype)
        assert_near(ByteLinear(weight, bias)(x), expected_of(x, weight) + bias.float(), dtype)
        assert_near(ByteLinear(weight, None)(x), expected_of(x, weight), dtype)
        residual = torch.randn(rows, ops.wide(columns), generator=generator)
        wanted = residual[:, :columns] + expected_of(x, weight)
        ByteLinear(weight, None).add_to(residual, x)
        assert_near(residual[:, :columns], wanted, dtype)
    gate = ByteGate(weight, weight.flip(0))
    found = gate.rows(x, torch.empty(rows, gate.width, dtype=dtype))
    assert_near(found, F.silu(expected_of(x, weight)) * expected_of(x, weight.flip(0)), dtype)


def test_rows_do_not_depend_on_each_other_nor_on_threads():
    x, weight = torch.randn(100, 320).bfloat16(), torch.randn(640, 320).bfloat16()
    x[7] = 0
    x[8] *= 1000
    layer = ByteLinear(weight, None)
    together = layer(x)
    assert all(torch.equal(layer(x[i : i + 1])[0], together[i]) for i in range(100))
    assert not together[7].any()
    try:
        for threads in (1, 2, 4):
            set_num_threads(threads)
            assert torch.equal(layer(x), together)
    finally:
        set_num_threads(1)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_models_run_and_take_no_adapters(family, models_dir):
    driver = Driver(core(make_model(models_dir, family), quantization="int8", max_model_len=128))
    assert driver.engine.info.max_adapter_rank == 0
    refused = driver.submit(0, [1, 2], adapter=AdapterRef("0" * 64, "/nowhere"))
    assert refused is not None
    assert refused.finish_reason == "error"
    asked = prompts(400, (30, 5, 41))
    for i, prompt in enumerate(asked):
        driver.submit(i, prompt, max_tokens=20, ignore_eos=True)
        driver.step()
    driver.run()
    for i, prompt in enumerate(asked):  # alone as in a batch
        alone = Driver(driver.engine)
        alone.submit(9, prompt, max_tokens=20, ignore_eos=True)
        alone.run()
        assert alone.tokens(9) == driver.tokens(i)


def test_the_demo_model_still_gives_its_answers():
    exact, small = (Driver(core(DEMO, quantization=kind)) for kind in ("none", "int8"))
    asked = prompts(1700, (20,) * 6, seed=1)
    for driver in (exact, small):
        for i, prompt in enumerate(asked):
            driver.submit(i, prompt, max_tokens=1, logprobs=5)
        driver.run()
    for i in range(len(asked)):
        (left,), (right,) = (d.outputs[i][-1].logprobs for d in (exact, small))
        assert dict(left.top).keys() & dict(right.top).keys()
        assert abs(left.logprob - right.logprob) < 0.5
