"""Bounds the logits that a step computes for log-probabilities of prompts: a row of the vocabulary for each prompt token."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.request import Request

MAX_BYTES = 256 << 20
"""Of a step's rows in float32; prompts that need more take several steps."""


def max_prompt_rows(vocab_size: int) -> int:
    """The rows that a step may compute for prompts; at least 1."""
    return max(1, MAX_BYTES // (4 * vocab_size))


class PromptLogits:
    """The rows that one step may still compute."""

    def __init__(self, rows: int) -> None:
        self._left = rows

    def keeps_out(self, request: Request) -> bool:
        """Whether a waiting request should not start in this step, because it would get no rows."""
        return request.params.prompt_logprobs is not None and self._left == 0

    def grant(self, request: Request, count: int) -> int:
        """How many of the request's next `count` tokens may be computed; their rows are used. 0 only if no rows are left."""
        wanted = request.prompt_rows(request.num_computed_tokens + count)
        if len(wanted) > self._left:
            count = wanted.start + self._left - request.num_computed_tokens
        self._left -= min(len(wanted), self._left)
        return count
