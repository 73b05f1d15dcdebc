"""Draft tokens by prompt lookup (arXiv 2304.04487): the tokens that followed the last occurrence of the sequence's
final two tokens.

Verifying a draft is cheap in small batches, because such a step is bound by reading the weights. A draft token is kept
only if the model chooses the same token, so drafts never change the output where a forward pass is batch-invariant (`Backend.rounding`).
Elsewhere they are rows of the step like those of other sequences, and may as these do change how logits round.
"""

from __future__ import annotations

FREE_ROWS = 8
"""The most rows of a step that is still bound by reading the weights: a step of 8 rows took 13 ms, and one of a single
row took 9 ms (the 135M shape in docs/benchmarks.md).
"""
PAUSE_TOKENS = 16
"""Tokens to generate after a fully rejected draft before drafting again."""


def allowance(running: int, limit: int) -> int:
    """The most draft tokens per sequence, up to `limit`, when `running` sequences share a step."""
    return min(limit, FREE_ROWS // max(running, 1) - 1)


class PromptLookup:
    """The drafts of one sequence: an index from each token pair to its last position, and the current draft length."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, int], int] = {}
        self._indexed = 1
        self._length = 1
        self._resume_at = 0

    def propose(self, token_ids: list[int], limit: int) -> list[int]:
        """Up to `limit` draft tokens; often none."""
        for end in range(self._indexed, len(token_ids) - 1):  # without the last pair, which is the one to look up
            self._after[token_ids[end - 1], token_ids[end]] = end + 1
        self._indexed = max(self._indexed, len(token_ids) - 1)
        if len(token_ids) < max(self._resume_at, 2):
            return []
        start = self._after.get((token_ids[-2], token_ids[-1]))
        if start is None:
            return []
        period = len(token_ids) - start  # the text since the match is assumed to repeat
        return [token_ids[start + i % period] for i in range(min(limit, self._length))]

    def learn(self, proposed: int, accepted: int, length: int) -> None:
        """Adapt the draft length: the model accepted `accepted` of `proposed` draft tokens, and the sequence now has
        `length` tokens.
        """
        if accepted == proposed:
            self._length = min(2 * self._length, FREE_ROWS)
        elif accepted:
            self._length = accepted
        else:
            self._length, self._resume_at = 1, length + PAUSE_TOKENS
