"""Draft tokens of a sequence: what followed its last two tokens the time before (prompt lookup, arXiv 2304.04487).

A draft costs little where a step has few rows, since reading the weights takes most of its time. Draft tokens are only
ever compared with what the model chooses: which tokens come out does not depend on them.
"""

from __future__ import annotations

FREE_ROWS = 8
"""Reading the weights takes most of a step of so many rows: one took 13 ms where one of a single row took 9 (the 135M
shape in docs/benchmarks.md).
"""
PAUSE_TOKENS = 16
"""After a draft that was all wrong, so many tokens pass before the next one."""


def allowance(running: int, limit: int) -> int:
    """How many draft tokens each of `running` sequences may have, `limit` at most."""
    return min(limit, FREE_ROWS // max(running, 1) - 1)


class PromptLookup:
    """One sequence's drafts: where each pair of tokens was last seen, and how the latest drafts went."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, int], int] = {}
        self._indexed = 1
        self._length = 1
        self._resume_at = 0

    def propose(self, token_ids: list[int], limit: int) -> list[int]:
        """At most `limit` tokens that may follow; often none."""
        for end in range(self._indexed, len(token_ids) - 1):  # the last pair is what is looked for
            self._after[token_ids[end - 1], token_ids[end]] = end + 1
        self._indexed = max(self._indexed, len(token_ids) - 1)
        if len(token_ids) < max(self._resume_at, 2):
            return []
        start = self._after.get((token_ids[-2], token_ids[-1]))
        if start is None:
            return []
        period = len(token_ids) - start  # what was said once is taken to be said again and again
        return [token_ids[start + i % period] for i in range(min(limit, self._length))]

    def learn(self, proposed: int, accepted: int, length: int) -> None:
        """Of `proposed` tokens `accepted` were right, and the sequence is `length` tokens long now: propose more or fewer."""
        if accepted == proposed:
            self._length = min(2 * self._length, FREE_ROWS)
        elif accepted:
            self._length = accepted
        else:
            self._length, self._resume_at = 1, length + PAUSE_TOKENS
