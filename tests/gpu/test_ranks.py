"""One model over two processes: on two devices, or over Triton's interpreter where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from engine.backend import backend_for
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.gpu.backend import DeviceBackend
from engine.model_files import ModelError
from scripts.random_models import make_model
from tests.engine.engines import Driver, Reference, prompts

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two devices, or none, are needed")


def split_engine(model, device: torch.device, **options: object) -> EngineCore:
    config = EngineConfig(
        model=str(model), dtype="float32", kv_cache_bytes=1 << 24, max_model_len=128, tensor_parallel_size=2, threads=1,
        speculative_tokens=0, **options,
    )  # fmt: skip
    return EngineCore(config, DeviceBackend(config, device))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral"])
def test_family_equals_generate(family, models_dir, device):
    """With chunks, sequences that join, and steps that take their ids from the step before."""
    model = make_model(models_dir, family)
    core = split_engine(model, device, max_num_batched_tokens=17, max_num_seqs=4)
    try:
        heads = core.specs[0].num_heads
        driver = Driver(core)
        asked = prompts(400, (30, 5, 41, 9))
        for i, prompt in enumerate(asked):
            assert driver.submit(i, prompt, max_tokens=12, ignore_eos=True) is None
            driver.step()
        driver.run()
        reference = Reference(model)
        assert heads == reference.model.config.num_attention_heads // 2
        for i, prompt in enumerate(asked):
            reference.assert_equal(prompt, driver.tokens(i))
        others = core.backend._ranks._others
        assert all(other.poll() is None for other in others)
    finally:
        core.close()
    assert [other.wait(20) for other in others] == [0]


def test_what_cannot_be_split_is_refused(models_dir, device):
    """By the model's own family, and by what this machine has."""
    model = make_model(models_dir, "gpt2")
    script = textwrap.dedent(f"""
        import torch
        from engine.config import EngineConfig
        from engine.gpu.backend import DeviceBackend
        from engine.model import load_model
        from engine.model_files import ModelError
        config = EngineConfig(model={str(model)!r}, dtype="float32", tensor_parallel_size=2)
        try:
            load_model(config, DeviceBackend(config, torch.device({device.type!r})))
        except ModelError as error:
            print(error)
    """)
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert "GPT2LMHeadModel" in found.stdout
    assert "tp_plan" in found.stdout
    config = EngineConfig(model=str(model), tensor_parallel_size=2, device="cpu")
    with pytest.raises(ModelError, match="tensor_parallel_size is for CUDA devices"):
        backend_for(config)


@pytest.mark.parametrize("victim", ["other", "first"])
def test_all_processes_end_with_any(victim, models_dir, device):
    model = make_model(models_dir, "llama")
    script = textwrap.dedent(f"""
        import sys, torch
        from engine.config import EngineConfig
        from engine.core import EngineCore
        from engine.gpu.backend import DeviceBackend
        config = EngineConfig(model={str(model)!r}, dtype="float32", kv_cache_bytes=1 << 24, max_model_len=128,
                              tensor_parallel_size=2, threads=1)
        core = EngineCore(config, DeviceBackend(config, torch.device({device.type!r})))
        print(core.backend._ranks._others[0].pid, flush=True)
        sys.stdin.read()
    """)
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        other = int(first.stdout.readline())
        if victim == "other":
            os.kill(other, 9)
            assert first.wait(30) == 4
            return
        first.kill()
    # A process that is no child of ours is gone when its entry is.
    subprocess.run(["timeout", "30", "tail", "--pid", str(other), "-f", "/dev/null"], check=True)
