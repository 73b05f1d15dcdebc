"""The one internal form of a result: what each engine output brought one sequence, as text and as tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.messages import TokenLogprob


@dataclass(slots=True)
class Delta:
    """New text and tokens of sequence `index`.

    `text` may lag behind the tokens: incomplete characters and possible stop strings are held back. `token_texts`
    has each shown token's own text; special tokens have theirs when the request asked for `token_texts`. `finish_reason` is None,
    "stop" (end of sequence, stop token or stop string) or "length". `stop_reason` is the stop string or stop token
    id that ended it, None for the model's own end of sequence.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    token_texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    ended_by_eos: bool = False


@dataclass(slots=True)
class Usage:
    """Token counts of one request; completion tokens are summed over its sequences and include end tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class Timings:
    """Seconds on the monotonic clock."""

    arrived: float
    submitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    finished: float = 0.0
    queue_s: float = 0.0
