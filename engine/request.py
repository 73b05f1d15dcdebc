"""The state of one sequence in the engine. Only data; the scheduler changes it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from engine.block_hashes import cache_key
from engine.messages import NOBODY, Tenant

if TYPE_CHECKING:
    from engine.failures import Failure, FinishReason
    from engine.grammar.matcher import Matcher
    from engine.kv_transfer.handle import KvSource
    from engine.messages import AdapterRef
    from engine.sampling.params import SamplingParams
    from engine.speculation.prompt_lookup import PromptLookup


PENDING = -1
"""Placeholder in `token_ids` for a token that a launched step samples and the host has not read."""


class RequestStatus(Enum):
    """The states of a request in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Hold(Protocol):
    """Keeps a request's blocks for another worker (`engine.kv_transfer.holds`)."""

    @property
    def source(self) -> KvSource | None:
        """Where the blocks are, once the sequence has ended here."""

    def progress(self, request: Request) -> None:
        """The results of a step have been read."""

    def suspend(self) -> None:
        """The request is about to lose its blocks, and will compute them again."""

    def keep(self, request: Request) -> None:
        """The sequence ends here: take over its blocks."""

    def leave(self) -> None:
        """The request leaves the engine."""


class Incoming(Protocol):
    """The blocks that another worker computed for a request (`engine.kv_transfer.arrivals`)."""

    settled: bool
    """Whether they are here, or will not come."""

    def fill(self, request: Request) -> None:
        """Write them into the blocks of the starting request, and count them as computed."""

    def cancel(self) -> None:
        """The request leaves the engine."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """One sequence: its prompt and output tokens, and the progress of its KV cache.

    `token_ids` is prompt and output and never shrinks; the request is created with its prompt alone.
    `num_computed_tokens` counts its tokens whose keys and values are in the cache, or will be when the launched step
    ends. `block_hashes` has one entry per full block, extended lazily. Times are monotonic seconds; the `arrival`
    of a sequence that another worker has begun is when its client asked for it.
    """

    key: tuple[int, int]  # (client, request id)
    token_ids: list[int]
    params: SamplingParams
    arrival: float
    priority: int = 0
    cache_salt: str = ""
    adapter: AdapterRef | None = None
    deadline: float | None = None
    tenant: Tenant = NOBODY
    band: int = 0
    original_length: int = sys.maxsize
    """Longer sequences rotate all of their positions otherwise (`engine.models.long_rope`)."""

    status: RequestStatus = RequestStatus.WAITING
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_read_tokens: int = 0
    """The computed tokens of steps whose results have been read."""
    num_pending_tokens: int = 0
    """The number of PENDING tokens at the end of `token_ids`."""
    num_reusable_tokens: int = 0
    """The first tokens that the prefix cache had when the request came."""
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    is_long: bool = False
    """Whether its blocks are those of a sequence over the `original_length`."""
    num_prompt_logprobs: int = 0
    first_scheduled: float | None = None
    dropped: FinishReason | None = None
    """ABORT, MOVED or ERROR: the next step drops the request with this reason, and with its `failure`."""
    stopped_by_gate: bool = False
    """Whether it last waited for its adapter or grammar, and not for its turn."""
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    matcher: Matcher | None = None
    """The grammar that the output follows. The request is in no step while it is not ready."""
    failure: Failure | None = None
    """Why the request failed, if it did."""
    lookup: PromptLookup | None = None
    """The source of its draft tokens; None before the first draft."""
    hold: Hold | None = None
    """Keeps its blocks for another worker; the sequence then ends here after one token."""
    incoming: Incoming | None = None
    """The request does not start before these blocks are here, or lost."""
    sampler_state: Any = None
    """The sampler's state between steps (`engine.sampling.adjustments.State`)."""
    stop_token_ids: frozenset[int] = frozenset()
    """Those of `params`, in which each token is looked up."""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)
        self.stop_token_ids = frozenset(self.params.stop_token_ids)

    def leave(self) -> None:
        """Let go of its grammar, and of what is between it and other workers: it leaves the engine."""
        if self.matcher is not None:
            self.matcher.close()
        if self.hold is not None:
            self.hold.leave()
        if self.incoming is not None:
            self.incoming.cancel()

    def begin_anew(self) -> None:
        """It has no blocks: what is computed from now on is of a sequence of its present length."""
        self.num_computed_tokens = self.num_read_tokens = 0
        if self.is_long != (len(self.token_ids) > self.original_length):
            self.is_long = not self.is_long
            self.block_hashes = []
            self.num_reusable_tokens = 0

    @property
    def outgrown(self) -> bool:
        """Whether all of it must be computed again, since it has become longer than the `original_length`."""
        return not self.is_long and len(self.token_ids) > self.original_length

    @property
    def room(self) -> int:
        """The number of tokens that may be added before it is outgrown."""
        return sys.maxsize if self.is_long else self.original_length - len(self.token_ids)

    @property
    def is_here(self) -> bool:
        """Whether no blocks of another worker are still on their way to the waiting request."""
        return self.incoming is None or self.incoming.settled

    @property
    def begun(self) -> bool:
        """Whether this worker or another one has computed some of it."""
        return self.first_scheduled is not None or bool(self.num_output_tokens)

    @property
    def decodes(self) -> bool:
        """Whether all tokens but the last have been computed, so that the next step gives the next token."""
        length = len(self.token_ids)
        return self.num_computed_tokens >= length - 1 and length > self.num_prompt_tokens

    def prompt_rows(self, end: int) -> range:
        """The positions below `end`, not computed yet, whose logits are wanted for log-probabilities of the prompt. The logits at
        position p predict the prompt token at p + 1; after a preemption some are known already.
        """
        if self.params.prompt_logprobs is None:
            return range(0)
        return range(max(self.num_computed_tokens, self.num_prompt_logprobs), min(end, self.num_prompt_tokens - 1))

    @property
    def waits_for_grammar(self) -> bool:
        """Whether sampling must wait for the grammar's next mask."""
        return self.matcher is not None and not self.matcher.ready

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens so far, PENDING ones included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output tokens without the PENDING ones."""
        return len(self.token_ids) - self.num_pending_tokens

    @property
    def cache_key(self) -> str:
        """Besides the tokens, what must be equal for requests to share blocks: the tenant's salt, the adapter, and
        whether they are long.
        """
        return cache_key(self.adapter.digest if self.adapter else "", self.cache_salt, self.is_long)
