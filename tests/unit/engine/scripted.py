"""A scheduler whose model is a script: a step computes what is scheduled, and samples what a test names."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.failures import FinishReason
from engine.gates.base import Gate
from engine.policies.base import Policy
from engine.policies.priority import Priority
from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.scheduled_batch import ScheduledBatch
from engine.scheduler import Scheduler
from engine.step_time import StepTime

SIZE = 4
"""Tokens of a block."""
NEXT = 900
"""The token that a model without a script samples."""


def ask(
    number: int,
    prompt: int | Sequence[int] = 5,
    *,
    max_tokens: int = 8,
    params: dict[str, Any] | None = None,
    **fields: Any,
) -> Request:
    """The request of this number, which arrives at this second. A number as prompt is so many tokens of its own."""
    tokens = [10 * (number + 1)] * prompt if isinstance(prompt, int) else list(prompt)
    sampling = SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **(params or {})})
    return Request((1, number), tokens, sampling, arrival=float(number), **fields)


class Engine:
    """A scheduler and its scripted model; requests are known by their numbers."""

    def __init__(
        self,
        *requests: Request,
        blocks: int = 100,
        caching: bool = False,
        gates: Sequence[Gate] = (),
        eos: Iterable[int] = (),
        max_model_len: int = 1000,
        policy: Policy | None = None,
        step_time: StepTime | None = None,
        rows: int = sys.maxsize,
        original_length: int = sys.maxsize,
        **options: Any,
    ) -> None:
        """`blocks` counts those that requests can hold. The requests are added."""
        budget = options.get("max_num_batched_tokens", 1024)
        plain = {"max_step_ms": 0, "speculative_tokens": 0, "max_num_seqs": min(64, budget)}
        config = EngineConfig(model="none", block_size=SIZE, **{**plain, **options})
        self.pool = BlockPool(blocks + 1, SIZE, caching)
        self.scheduler = Scheduler(
            config, self.pool, max_model_len, eos, policy or Priority(), gates, step_time, rows, original_length
        )
        self.add(*requests)

    def add(self, *requests: Request) -> None:
        """All of them are taken."""
        for request in requests:
            assert self.scheduler.add(request) is None

    def change(self, **options: Any) -> None:
        """Go on with other options."""
        self.scheduler.config = replace(self.scheduler.config, **options)

    @property
    def waiting(self) -> list[int]:
        return [request.key[1] for request in self.scheduler.waiting]

    @property
    def running(self) -> list[int]:
        return [request.key[1] for request in self.scheduler.running]

    def plan(self, awaited: bool = False) -> dict[int, int]:
        """The next step, which is not computed: how many tokens of which request."""
        return told(self.scheduler.schedule(awaited))

    def step(self, **tokens: int | list[int]) -> dict[int, int]:
        """Compute a step. `t3=7` is what request 3 samples; several are accepted drafts and the token behind them."""
        batch = self.scheduler.schedule()
        self.compute(batch, **tokens)
        return told(batch)

    def compute(self, batch: ScheduledBatch, **tokens: int | list[int]) -> dict[int, FinishReason]:
        """Launch a scheduled step and read its tokens at once; why requests ended."""
        self.scheduler.launched(batch)
        sampled = {}
        for request, end in zip(batch.requests, batch.ends, strict=True):
            if end == len(request.token_ids):
                given = tokens.get(f"t{request.key[1]}", NEXT)
                sampled[request] = list(given) if isinstance(given, list) else [given]
        ended = self.scheduler.update(batch, sampled)
        self.pool.check_integrity()
        return {request.key[1]: reason for request, reason in ended.items()}


class Open(Gate):
    """Lets everybody pass."""


def told(batch: ScheduledBatch) -> dict[int, int]:
    """How many tokens of which request, in order."""
    return {r.key[1]: count for r, count in zip(batch.requests, batch.num_new_tokens, strict=True)}
