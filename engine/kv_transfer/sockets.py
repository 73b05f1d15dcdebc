"""The default transport: blocks in pieces over a stream socket between the two workers.

The receiver dials the sender's own address and sends `Pull`. The sender answers `Offer`, or `Declined` with a code; then pieces, each a header and
its bytes, as the blocks are filled; then `End`. A piece of no blocks means that the sender still waits for the next one. The
receiver says `Done` when all have been verified. EOF before `End` means that the sender has lost them.
"""

from __future__ import annotations

import logging
import socket
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from engine.address import AddressError, parse
from engine.kv_transfer.handle import Identity, TransferCode, foreign
from engine.kv_transfer.holds import HoldEnded
from engine.kv_transfer.messages import Pull
from engine.kv_transfer.transport import STALL_S, TransferFailed
from engine.messages import MALFORMED, PROTOCOL_VERSION, frame, frame_length
from engine.network.credentials import CredentialsError

if TYPE_CHECKING:
    from engine.kv_transfer.blocks import Bytes
    from engine.kv_transfer.handle import KvSource
    from engine.kv_transfer.holds import Hold, Holds
    from engine.kv_transfer.transport import Sink, Wanted
    from engine.network.credentials import Credentials

logger = logging.getLogger(__name__)

DIAL_S = 5.0
BEAT_S = 1.0
PIECE_BYTES = 1 << 20
"""About what a piece holds: small beside a step, so that the engine's loop never waits long for a block that is being read."""
MAX_HEADER_BYTES = 1 << 10


class Offer(msgspec.Struct, array_like=True, tag=True):
    """The sender has the blocks, and these are of `identity`, each of `block_bytes`."""

    identity: Identity
    block_bytes: int


class Declined(msgspec.Struct, array_like=True, tag=True):
    """The sender has no such blocks for this receiver."""

    code: TransferCode


class Piece(msgspec.Struct, array_like=True, tag=True):
    """The header of `count` blocks, whose bytes follow. `digest` is the SHA-256 of these."""

    first: int
    count: int
    digest: bytes = b""


class End(msgspec.Struct, array_like=True, tag=True):
    """All blocks have been sent."""


class Done(msgspec.Struct, array_like=True, tag=True):
    """The receiver has all blocks."""


_from_sender = msgspec.msgpack.Decoder(Offer | Declined | Piece | End)
_from_receiver = msgspec.msgpack.Decoder(Done)


def per_piece(block_bytes: int) -> int:
    """Blocks in a piece."""
    return max(1, PIECE_BYTES // block_bytes)


class Sockets:
    """Fetches and serves over stream sockets; an `engine.kv_transfer.transport.Transport`."""

    def __init__(self, credentials: Credentials | None = None) -> None:
        """`credentials`: what this worker shows to workers on other hosts."""
        self._credentials = credentials

    def fetch(self, source: KvSource, wanted: Wanted, sink: Sink) -> None:
        """As the interface says."""
        try:
            with parse(source.address).dial(DIAL_S, self._credentials) as connection:
                connection.settimeout(STALL_S)
                _receive(connection, source, wanted, sink)
        except TimeoutError as error:
            raise TransferFailed(TransferCode.STALLED) from error
        except (OSError, AddressError, CredentialsError) as error:
            raise TransferFailed(TransferCode.LOST) from error
        except MALFORMED as error:
            raise TransferFailed(TransferCode.MALFORMED) from error

    def serve(self, connection: socket.socket, pull: Pull, holds: Holds, block_bytes: int) -> None:
        """As the interface says. A receiver that vanishes may come again: the blocks are still held."""
        with connection:
            try:
                connection.settimeout(STALL_S)
                hold = holds.find(pull.transfer_id)
                code = TransferCode.UNKNOWN if hold is None else foreign(hold.identity, pull.identity)
                if hold is None or code is not None:
                    connection.sendall(frame(Declined(code or TransferCode.UNKNOWN)))
                    return
                connection.sendall(frame(Offer(hold.identity, block_bytes)))
                _send(connection, hold, pull.first_block, per_piece(block_bytes), block_bytes)
                _from_receiver.decode(_read_frame(connection))
                hold.fetched()
            except HoldEnded:
                logger.info("a transfer ended before its blocks were sent")
            except (OSError, *MALFORMED) as error:
                logger.warning("a receiver of blocks was lost: %s", type(error).__name__)


def _send(connection: socket.socket, hold: Hold, first: int, most: int, block_bytes: int) -> None:
    while first < hold.announced.num_blocks:
        data = hold.read(first, most, BEAT_S)
        if data is None:
            connection.sendall(frame(Piece(first, 0)))
            continue
        count = len(data) // block_bytes
        connection.sendall(frame(Piece(first, count, sha256(data.data).digest())))
        connection.sendall(data.data)
        first += count
    connection.sendall(frame(End()))


def _receive(connection: socket.socket, source: KvSource, wanted: Wanted, sink: Sink) -> None:
    asked = (wanted.identity, wanted.num_tokens, wanted.first_block)
    connection.sendall(frame(Pull(PROTOCOL_VERSION, source.worker_id, source.epoch, source.transfer_id, *asked)))
    offer = _from_sender.decode(_read_frame(connection))
    if isinstance(offer, Declined):
        raise TransferFailed(offer.code)
    if not isinstance(offer, Offer):
        raise TransferFailed(TransferCode.MALFORMED)
    code = foreign(wanted.identity, offer.identity)
    if code is None and offer.block_bytes != wanted.block_bytes:
        code = TransferCode.FOREIGN_LAYOUT
    if code is not None:
        raise TransferFailed(code)
    following, most = wanted.first_block, per_piece(wanted.block_bytes)
    while not sink.cancelled:
        head = _from_sender.decode(_read_frame(connection))
        if isinstance(head, End):
            if following != wanted.num_blocks:
                raise TransferFailed(TransferCode.MALFORMED)
            connection.sendall(frame(Done()))
            return
        fits = isinstance(head, Piece) and 0 <= head.count <= min(most, wanted.num_blocks - following)
        if not isinstance(head, Piece) or not fits or head.first != following:
            raise TransferFailed(TransferCode.MALFORMED)
        if head.count:
            data = np.empty(head.count * wanted.block_bytes, np.uint8)
            _read_into(connection, data)
            if sha256(data.data).digest() != head.digest:
                raise TransferFailed(TransferCode.DAMAGED)
            sink.take(following, head.count, data)
            following += head.count


def _read_frame(connection: socket.socket) -> bytes:
    head = np.empty(4, np.uint8)
    _read_into(connection, head)
    body = np.empty(frame_length(head.tobytes(), MAX_HEADER_BYTES), np.uint8)
    _read_into(connection, body)
    return body.tobytes()


def _read_into(connection: socket.socket, data: Bytes) -> None:
    view = data.data
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError("the peer hung up in the middle")
        view = view[count:]
