"""What a request will cost a worker, and what speaks for one worker rather than another."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine.block_hashes import cache_key, extend_hashes

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_HASHED_TOKENS = 32768
"""Prompts are hashed up to here, which takes about a millisecond on the event loop."""


@dataclass(slots=True)
class Demand:
    """One sequence, or one request for embeddings, before it is sent.

    `adapter` is a digest, "" for none. Requests of one `session` prefer one worker; "" names no session. Without
    `reads_cache` the whole prompt is computed, whatever the worker's prefix cache holds.
    """

    token_ids: Sequence[int]
    max_tokens: int
    tenant: str = ""
    cache_salt: str = ""
    adapter: str = ""
    session: str = ""
    reads_cache: bool = True
    fetched: bool = False
    """Whether the prompt's blocks come from the worker that computed them."""
    _hashes: list[bytes] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """The prompt's length."""
        return len(self.token_ids)

    @property
    def num_hashed_tokens(self) -> int:
        """The tokens that `block_hashes` may cover."""
        return min(self.num_tokens, MAX_HASHED_TOKENS)

    def block_hashes(self, block_size: int) -> list[bytes]:
        """The engine's own hashes of the prompt's full blocks, computed once; none if the prefix cache is not read.
        `block_size` is always the same.
        """
        if not self.reads_cache:
            return []
        key = cache_key(self.adapter, self.cache_salt)
        extend_hashes(self._hashes, key, self.token_ids, self.num_hashed_tokens, block_size)
        return self._hashes

    def after_prefill(self) -> Demand:
        """The demand of the same sequence when another worker has computed its prompt."""
        return replace(self, fetched=True)

    def longer(self, token_ids: Sequence[int], max_tokens: int) -> Demand:
        """The demand of a prompt that begins with this one; the hashes so far are kept."""
        return replace(self, token_ids=token_ids, max_tokens=max_tokens, _hashes=list(self._hashes))
