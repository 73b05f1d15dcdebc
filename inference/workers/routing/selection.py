"""The choice among a deployment's workers, as pure functions of what is known about each.

`eligible` drops the workers that should get nothing; `choose` takes one of the rest: the least loaded if the loads are
far apart; else the one whose prefix cache holds most of the prompt, else one that has the adapter, else the session's,
else by load. A worker is preferred for what it holds only while it is not busier than that saves, so equal requests
spread evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from inference.workers.routing.demand import Demand

LOAD_GAP_TOKENS = 8192
LOAD_RATIO = 1.5
MATCH_RATIO = 0.3
PREFIX_WORTH = 2
"""What a cached token is worth in tokens of load: more than itself, for the next turn will be sent to the same worker."""
ADAPTER_TOKENS = 2048
"""What an adapter in a slot is worth; about as long takes reading one."""
SESSION_BOUND = 1.25
"""A session's worker may have this multiple of the least load."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is known about a worker when a request is placed.

    `load` is in outstanding tokens, `matched_tokens` is the prompt's known prefix. `free_blocks` None: not reported yet.
    """

    name: str
    load: float = 0.0
    inflight: int = 0
    foreign_requests: int = 0
    """Requests of other processes in the worker's last report."""
    matched_tokens: int = 0
    has_adapter: bool = False
    takes_adapters: bool = True
    free_blocks: int | None = None
    usable: bool = True
    responsive: bool = True
    admitted: bool = True
    """Whether its breaker lets a request through."""


def eligible(candidates: Sequence[Candidate], needed_blocks: int, adapter: bool) -> list[Candidate]:
    """The candidates that may get a request whose prompt fills `needed_blocks`, with an `adapter` or without.

    Usable and responsive ones only. The further conditions give way if no candidate meets them: then the queue of a
    worker, or its own refusal, is the better answer.
    """
    able = [c for c in candidates if c.usable and c.responsive]
    conditions: tuple[Callable[[Candidate], bool], ...] = (
        lambda c: c.admitted,
        lambda c: c.takes_adapters or not adapter,
        lambda c: c.free_blocks is None or c.free_blocks >= needed_blocks,
    )
    for condition in conditions:
        able = [c for c in able if condition(c)] or able
    return able


def choose(candidates: Sequence[Candidate], demand: Demand, random: Random) -> Candidate:
    """The candidate that gets the request; there is at least one."""
    least = _least_loaded(candidates, random)
    most = max(candidate.load for candidate in candidates)
    if most - least.load > LOAD_GAP_TOKENS and most > LOAD_RATIO * least.load:
        return least
    longest = max(candidate.matched_tokens for candidate in candidates)
    if longest > MATCH_RATIO * demand.num_hashed_tokens:
        holder = _spread([c for c in candidates if c.matched_tokens == longest], demand.session, random)
        if holder.load - least.load <= PREFIX_WORTH * (longest - least.matched_tokens):
            return holder
    if demand.adapter and (holders := [c for c in candidates if c.has_adapter]):
        holder = _spread(holders, demand.session, random)
        if holder.load - least.load <= ADAPTER_TOKENS:
            return holder
    return _spread(candidates, demand.session, random)


def _spread(candidates: Sequence[Candidate], session: str, random: Random) -> Candidate:
    """The session's candidate if it has one that is not too busy; else by load."""
    if session:
        least = min(c.load for c in candidates)
        bounded = [c for c in candidates if c.load <= SESSION_BOUND * least]
        return max(bounded, key=lambda c: blake2b(f"{session}\0{c.name}".encode(), digest_size=8).digest())
    if len(candidates) > 2 and any(c.foreign_requests for c in candidates):
        # Other processes see the same reports: if all took the least loaded, they would all take the same.
        candidates = random.sample(candidates, 2)
    return _least_loaded(candidates, random)


def _least_loaded(candidates: Sequence[Candidate], random: Random) -> Candidate:
    """The candidate with the least load, then with the fewest requests; any of equal ones."""
    least = min((c.load, c.inflight) for c in candidates)
    return random.choice([c for c in candidates if (c.load, c.inflight) == least])
