"""Counts sequences whose tokens and log-probabilities are the same alone and in a crowd, to the last bit."""

from __future__ import annotations

import random
import time
from pathlib import Path

from msgspec.structs import replace

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.cpu.kernels.threads import set_num_threads
from engine.messages import AdapterRef, Submit
from engine.sampling.params import SamplingParams
from tests.engine.few_blocks import few_blocks

SHARED, LONGEST, VOCABULARY, BLOCKS = 48, 100, 1500, 28
Work = list[tuple[list[int], SamplingParams, AdapterRef | None]]
Bits = dict[int, list[tuple[int, str]]]
CODED = "coded"


def make_work(count: int, adapters: list[AdapterRef], seed: int = 0) -> Work:
    """Prompts of 1 to LONGEST tokens, of which a third begin with the same SHARED tokens."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCABULARY) for _ in range(SHARED)]
    work: Work = []
    for number in range(count):
        own = [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, LONGEST - SHARED))]
        params = SamplingParams(
            max_tokens=rng.randint(2, 80), temperature=float(number % 2), seed=number, logprobs=0, ignore_eos=True
        )
        adapter = ([None, *adapters] if adapters else [None])[number % (1 + len(adapters))]
        work.append((shared + own if number % 3 == 0 else own, params, adapter))
    return work


def compute(engine: EngineCore, work: Work, together: int) -> Bits:
    """The tokens with their log-probabilities, of at most `together` sequences at a time."""
    found: Bits = {}
    waiting = list(enumerate(work))
    active = 0
    while waiting or engine.has_work:
        while waiting and active < together:
            number, (prompt, params, adapter) = waiting.pop(0)
            refusal = engine.submit(1, Submit(number, prompt, params, adapter=adapter))
            if refusal is not None:
                raise SystemExit(f"sequence {number} was refused: {refusal.error}")
            active += 1
        for output in engine.step().get(1, []):
            bits = found.setdefault(output.request_id, [])
            bits += [(each.token_id, each.logprob.hex()) for each in output.logprobs or []]
            active -= output.finish_reason is not None
        if engine.blocked:  # by the thread that reads an adapter, which needs the interpreter
            time.sleep(0.001)
    engine.close()
    return found


def compare(model: Path, dtype: str, work: Work) -> tuple[int, int]:
    """How many of the sequences have equal bits, and how often one was preempted."""
    common = EngineConfig(model=str(model), max_step_ms=0, weight_coding="off")
    if dtype == "int8":
        common = replace(common, dtype="bfloat16", quantization=dtype)
    else:
        common = replace(common, dtype="bfloat16" if dtype == CODED else dtype)
    one = replace(common, threads=1, prefix_caching=False)
    many = replace(common, max_num_batched_tokens=48, max_num_seqs=32, weight_coding="on" if dtype == CODED else "off")
    alone = compute(EngineCore(one), work, 1)
    crowd = EngineCore(many)
    with few_blocks(crowd.scheduler.pool, BLOCKS):
        among = compute(crowd, work, 32)
    set_num_threads(1)
    return sum(alone[number] == among[number] for number in range(len(work))), crowd.scheduler.num_preemptions
