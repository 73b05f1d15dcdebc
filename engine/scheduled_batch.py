"""What the scheduler decides for one step: which requests compute how many tokens. Only data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.request import Request


@dataclass(slots=True)
class ScheduledBatch:
    """The requests of one step, each with the number of tokens it computes."""

    requests: list[Request] = field(default_factory=list)
    num_new_tokens: list[int] = field(default_factory=list)
    """Draft tokens included."""
    ends: list[int] = field(default_factory=list)
    """The number of computed tokens of each request after the step, without draft tokens."""
    drafts: dict[Request, list[int]] = field(default_factory=dict)
    """Draft tokens by request; they are the last of its `num_new_tokens`."""
    bounded: bool = False
    """Whether the time of its prompts was limited."""

    @property
    def total_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(self.num_new_tokens)

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """For each request that computes more than one token, not counting draft tokens: its tokens in this step, and the number
        of tokens before them.
        """
        parts = zip(self.requests, self.num_new_tokens, self.ends, strict=True)
        return [
            (count, end - count) for r, count, end in parts if count > 1 and count != 1 + len(self.drafts.get(r, ()))
        ]
