"""The part `sampling`: decode steps of a model by how their tokens are chosen. The logits of random weights are flat,
the worst case of top-p without top-k.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from engine.sampling.params import SamplingParams
from tools.gpu.models import engine_of, model_of, path_of
from tools.gpu.results import Figure
from tools.gpu.steps import drive, prompts_of

if TYPE_CHECKING:
    from tools.gpu.part import Run

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "temperature, top-k and top-p": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
    "temperature and top-p": {"temperature": 1.0, "top_p": 0.9},
    "repetition penalty": {"temperature": 0.0, "repetition_penalty": 1.1},
    "frequency penalty": {"temperature": 0.0, "frequency_penalty": 0.5},
    "log-probabilities": {"temperature": 0.0, "logprobs": 5},
}
STREAMS = (32, 1, 128)


def run(run: Run) -> None:
    """A cell for each way and number of streams."""
    streams, tokens = ((1, 3), 8) if run.dry else (STREAMS, 64)
    model = functools.cache(lambda: model_of(run, run.argument))
    core = functools.cache(lambda: engine_of(run, model(), streams=max(streams)))

    def cell(kind: str, count: int) -> list[Figure]:
        def params(number: int) -> SamplingParams:
            return SamplingParams(max_tokens=tokens, ignore_eos=True, seed=number, **KINDS[kind])

        drive(core(), prompts_of(count, 16, seed=1), tokens, params=params)  # compiles what it meets first
        found = drive(core(), prompts_of(count, 16, seed=2), tokens, params=params)
        row = f"{run.argument}, {kind}{path_of(core())}"
        return [Figure(row=row, unit="ms a step", value=found.step_s * 1e3, column=count)]

    for kind in KINDS:
        for count in streams:
            run.measure(f"{kind}, {count} streams", functools.partial(cell, kind, count))
    if core.cache_info().currsize:
        core().close()
