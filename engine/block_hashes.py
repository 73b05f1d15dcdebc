"""The hash chain of the prefix cache: one hash per full block of a sequence. The router computes the same chain, but
not of long sequences, so this file imports nothing.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

DIGEST_BYTES = 16
"""128 bits, so equal hashes mean equal content."""
TOKEN_BYTES = 4


def cache_key(adapter_digest: str, cache_salt: str, is_long: bool = False) -> str:
    """Besides the tokens, what must be equal for sequences to share blocks: the adapter ("" for none), the tenant's
    salt, and whether they are longer than the original length of a model that has one.
    """
    return f"{adapter_digest}{'+' if is_long else ''}\0{cache_salt}"  # digests are hexadecimal


def extend_hashes(hashes: list[bytes], key: str, token_ids: Sequence[int], num_tokens: int, block_size: int) -> None:
    """Append the missing hashes of the full blocks in the first `num_tokens` of `token_ids`.

    `hashes` holds the chain so far, `key` is the `cache_key`. Each hash covers its block and all blocks before it.
    """
    first, end = len(hashes), num_tokens // block_size
    if first >= end:
        return
    parent = hashes[-1] if hashes else blake2b(key.encode(), digest_size=DIGEST_BYTES).digest()
    count, size = (end - first) * block_size, block_size * TOKEN_BYTES
    data = struct.pack(f"<{count}i", *token_ids[first * block_size : end * block_size])
    for start in range(0, count * TOKEN_BYTES, size):
        parent = blake2b(parent + data[start : start + size], digest_size=DIGEST_BYTES).digest()
        hashes.append(parent)
