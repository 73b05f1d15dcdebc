"""The parts `steps`: prompts and decode steps of a published shape, alone and with adapters, beside the rate of a
copy.

The floor of a step is the time to read the weights (as stored in the model's files, or a byte each) and the batch's
keys and values once, at the rate of copying a gigabyte, measured in the same part. A step's share is its floor's part
of its time.
"""

from __future__ import annotations

import functools
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig

from engine.messages import Submit
from engine.sampling.params import SamplingParams
from tools.gpu.models import adapters_of, engine_of, model_of, path_of
from tools.gpu.results import Figure
from tools.gpu.timing import copy_rate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engine.core import EngineCore
    from engine.messages import AdapterRef
    from tools.gpu.part import Run

STREAMS = (1, 32, 128, 8)
"""The order in which they are measured."""
PROMPTS = (128, 1024, 8000)
MOST_TOKENS = 1 << 17
"""Of all prompts of a cell: more would take the part's time."""
ADAPTERS = 8
CLIENT = 1


@dataclass(frozen=True, slots=True)
class Driven:
    """Seconds until all sequences decode (0: they never did at once), and of each step in which they do."""

    prompts_s: float
    steps_s: list[float]

    @property
    def step_s(self) -> float:
        """The median."""
        return statistics.median(self.steps_s)


def drive(
    core: EngineCore,
    prompts: list[list[int]],
    tokens: int,
    adapters: list[AdapterRef] | None = None,
    params: Callable[[int], SamplingParams] | None = None,
) -> Driven:
    """Prompts at once, then steps of all of them. `adapters` in turn; `params` by the sequence's number, greedy by
    default.
    """
    try:
        return _drive(core, prompts, tokens, adapters, params)
    finally:
        core.abort_client(CLIENT)  # what a failure leaves would be in the way of the next
        while core.has_work:
            core.step()


def _drive(
    core: EngineCore,
    prompts: list[list[int]],
    tokens: int,
    adapters: list[AdapterRef] | None,
    params: Callable[[int], SamplingParams] | None,
) -> Driven:
    greedy = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    begun = time.perf_counter()
    for number, prompt in enumerate(prompts):
        adapter = adapters[number % len(adapters)] if adapters else None
        asked = Submit(number, prompt, params(number) if params else greedy, adapter=adapter)
        refused = core.submit(CLIENT, asked)
        if refused is not None:
            raise RuntimeError(f"a sequence was refused: {refused.error}")
    prompts_s, times = 0.0, []
    while core.has_work:
        before, start = core.stats.decode_steps, time.perf_counter()
        for output in core.step().get(CLIENT, []):
            if output.error is not None:
                raise RuntimeError(f"a sequence failed: {output.error}")
        if core.blocked:
            time.sleep(1e-3)  # as a worker does, or the thread that reads adapters would hardly get the interpreter
        if core.stats.decode_steps > before and len(core.scheduler.running) == len(prompts):
            prompts_s = prompts_s or start - begun
            times.append(time.perf_counter() - start)
    return Driven(prompts_s, times)


def prompts_of(count: int, length: int, seed: int) -> list[list[int]]:
    """Random ids, so that no two share a prefix."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(10, 300, (length,), generator=generator).tolist() for _ in range(count)]


def floor_s(core: EngineCore, model: Path, streams: int, context: float, quantization: str, rate: float) -> float:
    """Seconds to read once every weight, but the embeddings where those are not the output layer too, and all keys and
    values.
    """
    config = AutoConfig.from_pretrained(model)
    head = config.vocab_size * config.hidden_size * 2
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    inner = weights - head * (1 if config.tie_word_embeddings else 2)
    if quantization == "int8":  # the output layer stays as it is
        inner /= 2
    cached = sum(spec.num_kv_heads * (spec.key_dim + spec.value_dim) * 2 for spec in core.specs)
    return (inner + head + streams * context * cached) / rate


def run(run: Run) -> None:
    """A cell for each number of adapters, length of prompts and number of streams."""
    shape, quantization = run.argument.split()
    streams, prompts, tokens = ((1, 3), (24, 60), 8) if run.dry else (STREAMS, PROMPTS, 64)
    rate = functools.cache(lambda: copy_rate(run.device))
    model = functools.cache(lambda: model_of(run, shape))
    core = functools.cache(lambda: engine_of(run, model(), quantization, max(streams)))
    adapters = functools.cache(lambda: adapters_of(run, model(), ADAPTERS))
    weights = "bfloat16" if quantization == "none" else quantization

    def cell(row: str, length: int, count: int, adapted: bool) -> list[Figure]:
        used = adapters() if adapted else None
        name = row + path_of(core())
        drive(core(), prompts_of(count, length, seed=1), 4, used)  # compiles, and reads adapters
        found = drive(core(), prompts_of(count, length, seed=2), tokens, used)
        least = floor_s(core(), model(), count, length + tokens / 2, quantization, rate())
        return [
            Figure(row=name, unit="ms a step", value=found.step_s * 1e3, column=count, share=least / found.step_s),
            Figure(row=name, unit="ms until all decode", value=found.prompts_s * 1e3, column=count),
        ]

    run.measure("copy", lambda: [Figure(row="copy of a gigabyte", unit="TB/s", value=rate() / 1e12)])
    for adapted in (False, True) if quantization == "none" else (False,):  # int8 serves no adapters
        for length in prompts:
            row = f"{shape}, {weights}, prompts of {length}{f', {ADAPTERS} adapters' if adapted else ''}"
            for count in streams:
                if count * length <= MOST_TOKENS:
                    name = f"{row}, {count} streams"
                    run.measure(name, functools.partial(cell, row, length, count, adapted))
    if core.cache_info().currsize:
        core().close()
