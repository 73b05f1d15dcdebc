"""Allocation of KV blocks: reference counts, the free list and the prefix cache. It never touches tensors.

A freed block keeps its content and its hash until it is allocated again, so the free list is also the LRU list of the
prefix cache. Block 0 is never allocated: padding rows write there.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

from engine.block_hashes import extend_hashes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.request import Request

TRASH_BLOCK = 0


class Owner(Protocol):
    """Has references to the blocks of its table."""

    block_table: list[int]


class BlockPool:
    """Reference-counted blocks with a hash-chained prefix cache."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        self.num_blocks, self.block_size, self.prefix_caching = num_blocks, block_size, prefix_caching
        self._references = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.filled: list[tuple[bytes, int]] | None = None
        """The blocks that `cache` has added, with their hashes; KV offload empties it after every step. None: nobody collects them."""

    @property
    def num_usable(self) -> int:
        """Blocks that requests can hold."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks without references; they may hold cached content."""
        return len(self._free)

    def extend_hashes(self, request: Request) -> None:
        """Compute the missing hashes of the request's full blocks."""
        if not self.prefix_caching:
            return
        extend_hashes(
            request.block_hashes, request.cache_key, request.token_ids, request.num_known_tokens, self.block_size
        )

    def reusable(self, request: Request) -> list[bytes]:
        """The hashes of the blocks that the request may take from the cache: at least one token must be computed for its
        logits, and prompt log-probabilities need every position's.
        """
        if request.params.prompt_logprobs is not None:
            return []
        return request.block_hashes[: (len(request.token_ids) - 1) // self.block_size]

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The cached blocks for the longest known prefix of `hashes`; takes no reference."""
        blocks = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_free_after(self, hit: Iterable[int]) -> int:
        """Free blocks that would remain if `hit` were taken."""
        return len(self._free) - sum(block in self._free for block in hit)

    def touch(self, blocks: Iterable[int]) -> None:
        """Take a reference to each cached block."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def refresh(self, blocks: list[int]) -> None:
        """Count these cached blocks, a chain, as used now: they are evicted after all others, the first of them last."""
        self.touch(blocks)
        self._release(blocks)

    def allocate(self, owner: Owner, num_tokens: int) -> bool:
        """Grow the owner's block table to hold `num_tokens`. False, with nothing changed, if too few are free."""
        needed = -(-num_tokens // self.block_size) - len(owner.block_table)
        if needed <= 0:
            return True
        if needed > len(self._free):
            return False
        owner.block_table += [self._take() for _ in range(needed)]
        return True

    def cache(self, request: Request, num_tokens: int) -> None:
        """Add the full blocks of the request's first `num_tokens`, which must be computed, to the prefix cache."""
        if not self.prefix_caching:
            return
        self.extend_hashes(request)
        for i in range(num_tokens // self.block_size - 1, -1, -1):
            block, digest = request.block_table[i], request.block_hashes[i]
            if block in self._hash_of:
                break
            if digest in self._block_of:  # another block has the same content
                continue
            self._hash_of[block] = digest
            self._block_of[digest] = block
            if self.filled is not None:
                self.filled.append((digest, block))

    def insert(self, chain: Iterable[bytes]) -> dict[bytes, int]:
        """Add blocks to the prefix cache whose content the caller fills in at once: a chain of hashes from its beginning,
        of which some are cached already. Returns the new blocks by hash, as many as are free; none is referenced.
        """
        held, new = [], {}
        for digest in chain:
            block = self._block_of.get(digest)
            if block is not None:
                self.touch([block])
            elif not self._free:
                break
            else:
                block = new[digest] = self._take()
                self._hash_of[block] = digest
                self._block_of[digest] = block
            held.append(block)
        self._release(held)
        return new

    def discard(self, blocks: Iterable[int]) -> None:
        """Take blocks that nobody references out of the prefix cache: their content is not what their hashes say."""
        for block in blocks:
            self._forget(block)
            self._free.move_to_end(block, last=False)

    def free(self, owner: Owner) -> None:
        """Drop the owner's references, last block first, so that a chain is evicted from its end."""
        self._release(owner.block_table)
        owner.block_table = []

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every block is free or referenced and the two hash tables agree."""
        held = sum(count > 0 for count in self._references)
        if held + len(self._free) != self.num_usable:
            raise RuntimeError(f"blocks leaked: {held} held and {len(self._free)} free of {self.num_usable}")
        if {digest: block for block, digest in self._hash_of.items()} != self._block_of:
            raise RuntimeError("the prefix cache's tables disagree")

    def _take(self) -> int:
        """The least recently used free block, with one reference and without content."""
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        self._references[block] = 1
        return block

    def _release(self, blocks: list[int]) -> None:
        """Drop a reference to each block, the last first; those without content are the next to be taken."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._hash_of:
                    self._free.move_to_end(block, last=False)

    def _forget(self, block: int) -> None:
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
