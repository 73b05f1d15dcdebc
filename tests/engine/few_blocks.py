"""Takes KV blocks away, so that sequences preempt each other: the least cache that can be configured is too large."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from engine.block_pool import BlockPool


@dataclass
class Holder:
    """Owns the blocks that nobody else may have."""

    block_table: list[int] = field(default_factory=list)


@contextmanager
def few_blocks(pool: BlockPool, left: int) -> Iterator[None]:
    """Leave `left` free blocks, and give the others back at the end. What a taken one cached is forgotten."""
    holder = Holder()
    assert pool.allocate(holder, (pool.num_free - left) * pool.block_size)
    yield
    pool.free(holder)


def forget_cached(pool: BlockPool) -> None:
    """Empty the prefix cache of what no sequence holds, as other sequences do that need every free block."""
    with few_blocks(pool, 0):
        pass
