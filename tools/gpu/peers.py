"""The parts of what else decodes on the device: transformers' continuous batching, and a compiled loop with a static
cache.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, StaticCache

from tools.gpu.models import model_of
from tools.gpu.results import Figure
from tools.gpu.steps import prompts_of
from tools.gpu.timing import wait

if TYPE_CHECKING:
    from tools.gpu.part import Run

PROMPT = 128
STREAMS = (1, 32, 8)
"""The order in which they are measured: each is compiled anew."""


def run(run: Run) -> None:
    """A cell for each number of streams."""
    model = functools.cache(lambda: load(run, shape))
    works = {"compiled": compiled_step_s, "batching": batching_step_s}
    rows = {"compiled": "torch.compile, static cache", "batching": "transformers, generate_batch"}
    kind, shape = run.argument.split()
    row, work = f"{shape}, {rows[kind]}", works[kind]

    def cell(count: int) -> list[Figure]:
        return [Figure(row=row, unit="ms a step", value=work(run, model(), count) * 1e3, column=count)]

    for count in STREAMS[:1] if run.dry else STREAMS:
        run.measure(f"{count} streams", functools.partial(cell, count))


def load(run: Run, shape: str) -> Any:
    """The model as transformers serves it."""
    dtype = torch.float32 if run.dry else torch.bfloat16
    return AutoModelForCausalLM.from_pretrained(model_of(run, shape), dtype=dtype).to(run.device).eval()


@torch.inference_mode()
def compiled_step_s(run: Run, model: Any, count: int) -> float:
    """The median of the steps of a greedy loop that somebody would write by hand; its step is one graph."""
    tokens, length = (6, 24) if run.dry else (128, PROMPT)
    prompt = torch.tensor(prompts_of(count, length, seed=1), device=run.device)
    cache = StaticCache(config=model.config, max_cache_len=length + tokens)
    options: dict[str, Any] = {"backend": "eager"} if run.dry else {"mode": "reduce-overhead"}
    step = torch.compile(model, fullgraph=True, dynamic=False, **options)
    position = torch.arange(length, device=run.device)[None].expand(count, -1)
    logits = model(input_ids=prompt, position_ids=position, past_key_values=cache, logits_to_keep=1).logits
    times = []
    for number in range(tokens):
        chosen = logits[:, -1].argmax(-1, keepdim=True)
        position = torch.full((count, 1), length + number, device=run.device)
        wait(run.device)
        begun = time.perf_counter()
        logits = step(input_ids=chosen, position_ids=position, past_key_values=cache).logits.clone()
        wait(run.device)
        times.append(time.perf_counter() - begun)
    torch.compiler.reset()
    return statistics.median(times[tokens // 4 :])  # the first ones compile


def batching_step_s(run: Run, model: Any, count: int) -> float:
    """The median of the times between tokens."""
    tokens, length = (4, 24) if run.dry else (48, PROMPT)
    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(num_blocks=32 if run.dry else 64)  # by default nearly all of the memory
    done = model.generate_batch(
        inputs=prompts_of(count, length, seed=2),
        generation_config=config,
        continuous_batching_config=batching,
        record_timestamps=True,
    )
    if sum(len(output.generated_tokens) for output in done.values()) != count * tokens:
        raise RuntimeError("transformers did not answer all requests")
    return statistics.median(b - a for output in done.values() for a, b in itertools.pairwise(output.timestamps))
