"""One sequence on its way through the engine. State only; the scheduler moves it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.failures import Failure
    from engine.grammar.matcher import Matcher
    from engine.messages import AdapterRef
    from engine.sampling.params import SamplingParams
    from engine.speculation.prompt_lookup import PromptLookup


PENDING = -1
"""Stands in `token_ids` for a token that a launched step is choosing, and that the host has not read yet."""


class RequestStatus(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, what was generated after it, and how far the KV cache has got.

    `token_ids` is prompt and output and never shrinks; `num_computed_tokens` chases its length, and counts what a
    launched step computes. `block_hashes` has one entry per full block, extended lazily. Times are monotonic seconds.
    """

    key: tuple[int, int]  # (client, request id)
    token_ids: list[int]
    params: SamplingParams
    arrival: float
    priority: int = 0
    cache_salt: str = ""
    adapter: AdapterRef | None = None
    deadline: float | None = None

    status: RequestStatus = RequestStatus.WAITING
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_read_tokens: int = 0
    """How many of the computed ones are of steps that have been read."""
    num_pending_tokens: int = 0
    """How many of the last tokens are PENDING."""
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    num_prompt_logprobs: int = 0
    first_scheduled: float | None = None
    aborted: bool = False
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    matcher: Matcher | None = None
    """The grammar that the output follows. While it is not ready the request takes part in no step."""
    failure: Failure | None = None
    """Why it cannot go on, once that is known."""
    lookup: PromptLookup | None = None
    """Where its draft tokens come from, once there were any."""
    sampler_state: Any = None
    """What the sampler keeps between steps (penalty counts); it dies with the request."""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def waits_for_grammar(self) -> bool:
        """Whether no token can be chosen yet, because what its grammar allows is not known."""
        return self.matcher is not None and not self.matcher.ready

    @property
    def num_output_tokens(self) -> int:
        """How many tokens were generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output without what is PENDING."""
        return len(self.token_ids) - self.num_pending_tokens

    @property
    def cache_key(self) -> str:
        """What must be equal, beside the tokens, for blocks to be shared: the tenant's salt and the adapter."""
        return f"{self.adapter.digest if self.adapter else ''}\0{self.cache_salt}"
