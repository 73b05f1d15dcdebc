"""What workers tell each other about the blocks of a prompt: where they are, what they are of, and why they were not had.

The keys and values of a prompt are of use only to a worker with the same model, numbers and layout, and only for the same tokens,
adapter and salt. `Identity` names all of that; both sides compare it. It holds digests and no content, so it may be
logged. Imports no torch.
"""

from __future__ import annotations

import json
import secrets
import struct
from enum import StrEnum
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

ID_BYTES = 16
MAX_TEXT_BYTES = 1 << 10
"""The longest text of a source."""


def new_transfer_id() -> str:
    """A name for the blocks of one prompt, which nobody guesses."""
    return secrets.token_hex(ID_BYTES)


class TransferCode(StrEnum):
    """Why blocks were not transferred. The receiver then computes the prompt itself."""

    UNKNOWN = "unknown"
    """The sender does not hold the blocks: it never did, gave them up, or another epoch was meant."""
    FOREIGN_MODEL = "foreign_model"
    FOREIGN_DTYPE = "foreign_dtype"
    FOREIGN_LAYOUT = "foreign_layout"
    FOREIGN_ADAPTER = "foreign_adapter"
    FOREIGN_SALT = "foreign_salt"
    FOREIGN_TOKENS = "foreign_tokens"
    FOREIGN_TRANSPORT = "foreign_transport"
    """The workers have different values of `kv_transport`."""
    DAMAGED = "damaged"
    """Bytes do not match their digest."""
    MALFORMED = "malformed"
    """The peer sent what is not of this protocol."""
    STALLED = "stalled"
    """The peer sent nothing for too long."""
    LOST = "lost"
    """The sender cannot be reached or hung up."""
    CROWDED = "crowded"
    """The receiver has as many transfers as it takes at a time."""


class Identity(msgspec.Struct, array_like=True, frozen=True):
    """What the blocks of a prompt are of, as digests. `layout` covers block size, layers, heads and their order in memory."""

    model: str
    dtype: str
    layout: str
    adapter: str
    """The adapter's digest; "" for none."""
    salt: str
    tokens: str


_FOREIGN = {
    "model": TransferCode.FOREIGN_MODEL,
    "dtype": TransferCode.FOREIGN_DTYPE,
    "layout": TransferCode.FOREIGN_LAYOUT,
    "adapter": TransferCode.FOREIGN_ADAPTER,
    "salt": TransferCode.FOREIGN_SALT,
    "tokens": TransferCode.FOREIGN_TOKENS,
}


def foreign(mine: Identity, theirs: Identity) -> TransferCode | None:
    """The first thing in which two identities differ; None if the blocks of one serve the other."""
    for name, code in _FOREIGN.items():
        if getattr(mine, name) != getattr(theirs, name):
            return code
    return None


def token_digest(token_ids: Sequence[int]) -> str:
    """The digest of a prompt."""
    return sha256(struct.pack(f"<{len(token_ids)}i", *token_ids)).hexdigest()


def salt_digest(cache_salt: str) -> str:
    """The digest of a tenant's salt."""
    return sha256(cache_salt.encode()).hexdigest()


class KvSource(msgspec.Struct, array_like=True, frozen=True):
    """Where the blocks of a prompt can be fetched: the worker at `address` holds them as `transfer_id`.

    They are those of the first `num_tokens` of a sequence; 0: there are none. They are held until a worker has fetched them, a client releases
    them, or a time has passed (`engine.kv_transfer.holds.HOLD_S`).
    """

    address: str
    worker_id: str
    epoch: int
    transfer_id: str
    num_tokens: int
    block_size: int

    @property
    def num_blocks(self) -> int:
        """Blocks that hold the tokens; the last may be partly filled."""
        return -(-self.num_tokens // self.block_size)

    def text(self) -> str:
        """The source as one line, for protocols that pass it on; `parse_source` reads it."""
        return json.dumps(msgspec.to_builtins(self), separators=(",", ":"))


def parse_source(text: str) -> KvSource:
    """The source of a text that `KvSource.text` made; raises ValueError. Whoever takes it from a client must check
    that its worker is one of his own: a worker connects to the address.
    """
    if len(text.encode(errors="replace")) > MAX_TEXT_BYTES:
        raise ValueError(f"a source has at most {MAX_TEXT_BYTES} bytes")
    try:
        source = msgspec.json.decode(text, type=KvSource)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ValueError(f"this is no source of blocks: {error}") from error
    if source.num_tokens < 0 or source.block_size < 1 or source.epoch < 0:
        raise ValueError("a source counts tokens from 0 and has blocks of at least 1 token")
    return source
