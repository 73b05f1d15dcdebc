"""The messages about transfers, among those of `engine.messages`. Imports msgspec and nothing heavier."""

from __future__ import annotations

import msgspec

from engine.kv_transfer.handle import Identity, KvSource, TransferCode


class Fetch(msgspec.Struct, array_like=True, tag=True):
    """Fetch these blocks, as they are filled, for a request that will name the same source.

    `token_ids` are the first tokens of its sequence, as many as the source has; `adapter` is a digest, "" for none.
    """

    source: KvSource
    token_ids: list[int]
    adapter: str = ""
    cache_salt: str = ""


class Release(msgspec.Struct, array_like=True, tag=True):
    """Give these transfers' blocks up, at the worker that holds them or at one that was told to `Fetch` them: nobody will go on from them.
    Unknown ids are ignored.
    """

    transfer_ids: list[str]


class Pull(msgspec.Struct, array_like=True, tag=True):
    """A worker's first frame on a connection to another one: it asks for the blocks of a transfer, from `first_block` on.

    The connection then speaks the protocol of `engine.kv_transfer.wire` and of the named transport. `identity` is that of the first
    `num_tokens` of its sequence.
    """

    protocol: int
    worker_id: str
    epoch: int
    transfer_id: str
    identity: Identity
    num_tokens: int
    first_block: int
    transport: str = "sockets"


class KvStats(msgspec.Struct, array_like=True, gc=False):
    """Blocks held for other workers now, and counts since the start: blocks fetched, and why others were not, by code."""

    held_blocks: int = 0
    fetched_blocks: int = 0
    failures: dict[TransferCode, int] = {}
