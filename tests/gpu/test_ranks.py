"""One model over two processes: on two devices, or over Triton's interpreter where there is none.

Each case has processes of its own, because a process group is for life.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

from engine.config import EngineConfig
from engine.devices import backend_for
from engine.models.files import ModelError
from tests.engine.engines import Reference, prompts
from tests.gpu.marks import slow
from tests.models.random_models import make_model

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two devices, or none, are needed")

BEGIN = """
    import json, os, sys, torch
    from engine.config import EngineConfig
    from engine.core import EngineCore
    from engine.gpu.backend import DeviceBackend
    from engine.models.files import ModelError
    config = EngineConfig(model=sys.argv[1], dtype="float32", kv_cache_bytes=1 << 24, max_model_len=128, threads=1,
                          max_num_batched_tokens=17, max_num_seqs=4, tensor_parallel_size=2, speculative_tokens=0)
    backend = DeviceBackend(config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    print(backend._ranks._others[0].pid, flush=True)
"""


@contextmanager
def rank_0(model, script: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `script` behind BEGIN."""
    command = [sys.executable, "-c", textwrap.dedent(BEGIN) + textwrap.dedent(script), str(model)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def assert_gone(pid: int) -> None:
    """Within some seconds; the process is no child of ours."""
    subprocess.run(["timeout", "30", "tail", "--pid", str(pid), "-f", "/dev/null"], check=True)


@pytest.mark.parametrize("family", ["llama", slow("qwen3"), slow("gemma2"), slow("mixtral")])
def test_family_equals_generate(family, models_dir):
    """With chunks, sequences that join, and steps that take their ids from the step before."""
    model = make_model(models_dir, family)
    script = """
        from tests.engine.engines import Driver, prompts
        driver = Driver(EngineCore(config, backend))
        for i, prompt in enumerate(prompts(400, (30, 5, 41, 9))):
            assert driver.submit(i, prompt, max_tokens=12, ignore_eos=True) is None
            driver.step()
        ahead = driver.engine._running is not None
        driver.run()
        heads = driver.engine.specs[0].num_heads
        print(json.dumps([heads, ahead, [driver.tokens(i) for i in range(4)]]), flush=True)
        driver.engine.close()
        print(backend._ranks._others[0].returncode, flush=True)
        os._exit(0)
    """
    with rank_0(model, script) as process:
        line_of(process)
        heads, ahead, tokens = json.loads(line_of(process))
        reference = Reference(model)
        assert heads == reference.model.config.num_attention_heads // 2
        assert ahead
        for prompt, found in zip(prompts(400, (30, 5, 41, 9)), tokens, strict=True):
            assert len(found) == 12
            reference.assert_equal(prompt, found)
        assert line_of(process) == "0\n"
        assert process.wait(60) == 0


def test_what_cannot_be_split_is_refused(models_dir):
    """By the model's own family, and by what this machine has."""
    model = make_model(models_dir, "gpt2")
    script = """
        try:
            EngineCore(config, backend)
        except ModelError as error:
            print(error, flush=True)
            print(backend._ranks._others[0].wait(60), flush=True)
            os._exit(0)
    """
    with rank_0(model, script) as process:
        line_of(process)
        refusal = line_of(process)
        assert "GPT2LMHeadModel" in refusal
        assert "tp_plan" in refusal
        assert line_of(process) == "3\n"
    config = EngineConfig(model=str(model), tensor_parallel_size=2, device="cpu")
    with pytest.raises(ModelError, match="tensor_parallel_size is for CUDA devices"):
        backend_for(config)


@pytest.mark.parametrize(
    ("victim", "loaded"),
    [("other", True), slow("first", False), slow("first", True), slow("other", False)],
    ids=["other-serving", "first-loading", "first-serving", "other-loading"],
)
def test_all_processes_end_with_any(victim, loaded, models_dir):
    """Idle, and where the other one waits in a collective of the load that this one never joins."""
    model = make_model(models_dir, "llama")
    script = "core = EngineCore(config, backend)\n" if loaded else ""
    script += 'print("here", flush=True)\nsys.stdin.read()\n'
    with rank_0(model, script) as process:
        other = int(line_of(process))
        line_of(process)
        if victim == "other":
            os.kill(other, 9)
            assert process.wait(60) == 4
        else:
            process.kill()
            process.wait()
            assert_gone(other)


def test_a_step_that_fails_here_ends_the_worker(models_dir):
    """The others are in the middle of it, and what they send next would be taken for something else."""
    model = make_model(models_dir, "llama")
    script = """
        from tests.engine.engines import Driver
        driver = Driver(EngineCore(config, backend))
        backend._compute = lambda *arguments: 1 / 0
        driver.submit(0, [5, 6, 7], max_tokens=4)
        driver.step()
        print(driver.finish_reason(0), flush=True)
        sys.stdin.read()
    """
    with rank_0(model, script) as process:
        other = int(line_of(process))
        assert line_of(process) == "error\n"
        assert process.wait(60) == 4
        assert_gone(other)
