"""Warm-up: runs synthetic requests before the worker is ready, so that kernels are compiled, buffers allocated, and the time of steps
known.

The requests cover prefill, decode, each way of sampling, and an adapter in every layer that takes one. Nothing is
counted or cached.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from engine.adapters.peft import Adapter, LoraWeights
from engine.block_pool import BlockPool
from engine.messages import AdapterRef
from engine.model_runner import LaunchedStep
from engine.process.progress import Pace, progress
from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.scheduled_batch import ScheduledBatch

if TYPE_CHECKING:
    from engine.adapters.slots import AdapterLayer
    from engine.config import EngineConfig
    from engine.model_runner import ModelRunner
    from engine.step_time import StepTime

PROMPT_TOKENS = 5
DIGEST = "warm-up"
"""Differs from the digest of any adapter's files."""
WAYS = (
    SamplingParams(2, temperature=0.0),
    SamplingParams(2, temperature=0.0, logprobs=2, prompt_logprobs=1),
    SamplingParams(2, temperature=0.7),
    SamplingParams(2, temperature=0.7, top_k=4, top_p=0.9, logprobs=1, logprobs_mode="processed"),
    SamplingParams(2, temperature=0.7, min_p=0.05, repetition_penalty=1.1, presence_penalty=0.1, min_tokens=1),
    SamplingParams(2, temperature=0.7, typical_p=0.9, logit_bias={0: -1.0}),
)
"""Ways of sampling; together they run every kernel and table of the sampler."""
TIMED_SEQUENCES = 8
TIMED_PROMPTS = ((64, 0), (64, 2048), (128, 0))
"""Prompt tokens of the steps that are timed, and the tokens before them: what is computed beside sequences that decode. A longer step would
also tell the rate by which requests are refused; that is left to real ones, for the machine may be busy while a worker starts.
"""
TIMED_S = 1.0
"""Prompts that probably take longer are not timed."""


def warm_up(runner: ModelRunner, lora_layers: list[AdapterLayer], context: int, pace: Pace) -> None:
    """Run the steps, with no sequence longer than `context` tokens, and record their durations in `pace`."""
    progress.begin("warming up")
    size = runner.cache.block_size
    length = min(PROMPT_TOKENS, context - 2)
    # No more sequences than there are blocks for: a cache may be as small as one short sequence.
    at_once = (runner.cache.num_blocks - 1) // -(-(length + 1) // size) if length > 0 else 0
    for first in range(0, len(WAYS), at_once) if at_once else ():
        _steps(runner, WAYS[first : first + at_once], length, None, pace)
    if lora_layers and at_once:
        adapter = _adapter(lora_layers)
        packed = [layer.make(adapter) for layer in lora_layers]
        for layer, weights in zip(lora_layers, packed, strict=True):
            layer.put(DIGEST, weights)
        try:
            _steps(runner, WAYS[:1], length, AdapterRef(DIGEST, ""), pace)
        finally:
            for layer in lora_layers:
                layer.drop(DIGEST)


def _steps(
    runner: ModelRunner, ways: tuple[SamplingParams, ...], length: int, adapter: AdapterRef | None, pace: Pace
) -> None:
    """Prefill a prompt of `length` tokens for each way of sampling, in one batch, then run one decode step."""
    pool = BlockPool(runner.cache.num_blocks, runner.cache.block_size, prefix_caching=False)
    requests = [Request((0, number), [0] * length, way, 0.0, adapter=adapter) for number, way in enumerate(ways)]
    for _ in range(2):
        _step(runner, pool, requests, pace)


def _step(runner: ModelRunner, pool: BlockPool, requests: list[Request], pace: Pace) -> float:
    """Compute all tokens of the requests that are not computed yet, and the next ones. Returns the seconds that it took."""
    counts = [len(request.token_ids) - request.num_computed_tokens for request in requests]
    for request in requests:
        pool.allocate(request, len(request.token_ids))
    begin = time.monotonic()
    launched = runner.launch(ScheduledBatch(requests, counts))
    result = launched.result() if isinstance(launched, LaunchedStep) else launched
    elapsed = time.monotonic() - begin
    pace.learn(sum(counts), elapsed)
    for request in requests:
        request.num_computed_tokens = len(request.token_ids)
        request.token_ids += result.tokens[request]
    return elapsed


def time_steps(runner: ModelRunner, config: EngineConfig, context: int, pace: Pace, step_time: StepTime) -> None:
    """Let `step_time` learn from steps in which sequences decode and from prompts, none longer than `context` tokens, so that the first
    prompts of clients are divided as later ones are. What would take long on this machine is left out.
    """
    progress.begin("timing steps")
    size, blocks = runner.cache.block_size, runner.cache.num_blocks
    room = min(context, (blocks - 1) * size)
    length = PROMPT_TOKENS + 4
    sequences = min(TIMED_SEQUENCES, config.max_num_seqs, (blocks - 1) // -(-length // size))
    if room < length or sequences * PROMPT_TOKENS > config.max_num_batched_tokens:
        return
    pool = BlockPool(blocks, size, prefix_caching=False)
    requests = [Request((0, number), [0] * PROMPT_TOKENS, WAYS[0], 0.0) for number in range(sequences)]
    _step(runner, pool, requests, pace)
    token_s = 0.0
    for decoding in (requests, requests[:1]):
        elapsed = min(_step(runner, pool, decoding, pace) for _ in range(2))
        step_time.learn(elapsed, len(decoding), [], bounded=False)
        token_s = token_s or elapsed / sequences
    for request in requests:
        pool.free(request)
    for count, start in TIMED_PROMPTS:
        if count * token_s > TIMED_S or count > config.max_num_batched_tokens:
            break
        start = min(start, (room - 1 - count) // size * size)
        if start < 0:
            break
        elapsed = min(_prompt_s(runner, pool, count, start, pace) for _ in range(2))
        step_time.learn(elapsed, 0, [(count, start)], bounded=False)
        token_s = elapsed / count


def _prompt_s(runner: ModelRunner, pool: BlockPool, count: int, start: int, pace: Pace) -> float:
    """Seconds of a step with `count` tokens of a prompt after `start` others, whose keys and values are whatever the cache holds."""
    request = Request((0, 0), [0] * (start + count), WAYS[0], 0.0)
    request.num_computed_tokens = start
    elapsed = _step(runner, pool, [request], pace)
    pool.free(request)
    return elapsed


def _adapter(layers: list[AdapterLayer]) -> Adapter:
    """A zero adapter for every adaptable layer."""
    return Adapter(
        {
            path: LoraWeights(torch.zeros(1, layer.in_features), torch.zeros(out, 1), None)
            for layer in layers
            for path, out in layer.parts
        }
    )
