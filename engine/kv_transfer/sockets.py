"""The default transport: blocks in pieces over the connection between the two workers itself.

After `Offer` come pieces, each a header and its bytes, as the blocks are filled. A piece of no blocks means that the sender still waits for the
next one. `engine.kv_transfer.wire` has the beginning and the end.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from engine.kv_transfer import wire
from engine.kv_transfer.handle import Identity, TransferCode
from engine.kv_transfer.transport import TransferFailed
from engine.kv_transfer.wire import Declined, Done, End

if TYPE_CHECKING:
    import socket

    from engine.kv_transfer.handle import KvSource
    from engine.kv_transfer.holds import Hold, Holds
    from engine.kv_transfer.messages import Pull
    from engine.kv_transfer.transport import Sink, Wanted
    from engine.network.credentials import Credentials

MAX_HEADER_BYTES = 1 << 10


class Offer(msgspec.Struct, array_like=True, tag=True):
    """The sender has the blocks, and these are of `identity`, each of `block_bytes`."""

    identity: Identity
    block_bytes: int


class Piece(msgspec.Struct, array_like=True, tag=True):
    """The header of `count` blocks, whose bytes follow. `digest` is the SHA-256 of these."""

    first: int
    count: int
    digest: bytes = b""


_from_sender = msgspec.msgpack.Decoder(Offer | Declined | Piece | End)
_from_receiver = msgspec.msgpack.Decoder(Done)


class Sockets:
    """Fetches and serves over stream sockets; an `engine.kv_transfer.transport.Transport`."""

    name = "sockets"

    def __init__(self, credentials: Credentials | None = None) -> None:
        """`credentials`: what this worker shows to workers on other hosts."""
        self._credentials = credentials

    def fetch(self, source: KvSource, wanted: Wanted, sink: Sink) -> None:
        """As the interface says."""
        with wire.asking(source, wanted, self._credentials, self.name) as connection:
            _receive(connection, wanted, sink)

    def serve(self, connection: socket.socket, pull: Pull, holds: Holds, block_bytes: int) -> None:
        """As the interface says."""
        with wire.answering(connection):
            hold = wire.admitted(connection, pull, holds, self.name)
            if hold is not None:
                wire.send(connection, Offer(hold.identity, block_bytes))
                _send(connection, hold, pull.first_block, block_bytes)
                _from_receiver.decode(wire.receive(connection, MAX_HEADER_BYTES))
                hold.fetched()


def _send(connection: socket.socket, hold: Hold, first: int, block_bytes: int) -> None:
    while first < hold.announced.num_blocks:
        data = hold.read(first, wire.per_piece(block_bytes), wire.BEAT_S)
        if data is None:
            wire.send(connection, Piece(first, 0))
            continue
        count = len(data) // block_bytes
        wire.send(connection, Piece(first, count, sha256(data.data).digest()))
        connection.sendall(data.data)
        first += count
    wire.send(connection, End())


def _receive(connection: socket.socket, wanted: Wanted, sink: Sink) -> None:
    offer = _from_sender.decode(wire.receive(connection, MAX_HEADER_BYTES))
    if isinstance(offer, Declined):
        raise TransferFailed(offer.code)
    if not isinstance(offer, Offer):
        raise TransferFailed(TransferCode.MALFORMED)
    wire.check_offer(wanted, offer.identity, offer.block_bytes)
    following, most = wanted.first_block, wire.per_piece(wanted.block_bytes)
    while not sink.cancelled:
        head = _from_sender.decode(wire.receive(connection, MAX_HEADER_BYTES))
        if isinstance(head, End):
            if following != wanted.num_blocks:
                raise TransferFailed(TransferCode.MALFORMED)
            wire.send(connection, Done())
            return
        fits = isinstance(head, Piece) and 0 <= head.count <= min(most, wanted.num_blocks - following)
        if not isinstance(head, Piece) or not fits or head.first != following:
            raise TransferFailed(TransferCode.MALFORMED)
        if head.count:
            data = np.empty(head.count * wanted.block_bytes, np.uint8)
            wire.receive_into(connection, data)
            if sha256(data.data).digest() != head.digest:
                raise TransferFailed(TransferCode.DAMAGED)
            sink.take(following, head.count, data)
            following += head.count
