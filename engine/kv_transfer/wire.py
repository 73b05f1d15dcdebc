"""What every transport says on the connection between two workers: who may have which blocks, and frames. It moves no blocks.

The receiver dials the sender's own address and sends `Pull`. The sender answers `Declined` with a code, or goes on as its transport does. At last
it says `End`, and the receiver `Done` when all blocks have been verified. EOF before `End` means that the sender has lost them.
"""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from engine.address import AddressError, parse
from engine.kv_transfer.handle import Identity, TransferCode, foreign
from engine.kv_transfer.holds import HoldEnded
from engine.kv_transfer.messages import Pull
from engine.kv_transfer.transport import TransferFailed
from engine.messages import MALFORMED, PROTOCOL_VERSION, frame, frame_length
from engine.network.credentials import CredentialsError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from engine.kv_transfer.blocks import Bytes
    from engine.kv_transfer.handle import KvSource
    from engine.kv_transfer.holds import Hold, Holds
    from engine.kv_transfer.transport import Wanted
    from engine.network.credentials import Credentials

logger = logging.getLogger(__name__)

DIAL_S = 5.0
STALL_S = 10.0
"""Seconds without a byte after which a peer is given up. A sender that waits for blocks to be filled says so every second."""
BEAT_S = 1.0
TICK_S = 0.0002
"""How often a side that waits for a frame does what else there is to do."""
PIECE_BYTES = 1 << 20
"""About what a piece holds: small beside a step, so that the engine's loop never waits long for a block that is being read."""


class Declined(msgspec.Struct, array_like=True, tag=True):
    """The sender has no such blocks for this receiver."""

    code: TransferCode


class End(msgspec.Struct, array_like=True, tag=True):
    """All blocks have been sent."""


class Done(msgspec.Struct, array_like=True, tag=True):
    """The receiver has all blocks."""


def per_piece(block_bytes: int) -> int:
    """Blocks in a piece."""
    return max(1, PIECE_BYTES // block_bytes)


@contextmanager
def asking(
    source: KvSource, wanted: Wanted, credentials: Credentials | None, transport: str
) -> Iterator[socket.socket]:
    """A connection to the sender, which has been asked for the blocks. What goes wrong on it becomes TransferFailed."""
    try:
        with parse(source.address).dial(DIAL_S, credentials) as connection:
            asked = (wanted.identity, wanted.num_tokens, wanted.first_block, transport)
            pull = Pull(PROTOCOL_VERSION, source.worker_id, source.epoch, source.transfer_id, *asked)
            send(connection, pull)
            yield connection
    except TimeoutError as error:
        raise TransferFailed(TransferCode.STALLED) from error
    except (OSError, AddressError, CredentialsError) as error:
        raise TransferFailed(TransferCode.LOST) from error
    except MALFORMED as error:
        raise TransferFailed(TransferCode.MALFORMED) from error


@contextmanager
def answering(connection: socket.socket) -> Iterator[None]:
    """Close a receiver's connection at the end. One that vanishes may come again: the blocks are still held."""
    with connection:
        try:
            yield
        except HoldEnded:
            logger.info("a transfer ended before its blocks were sent")
        except (OSError, *MALFORMED) as error:
            logger.warning("a receiver of blocks was lost: %s", type(error).__name__)


def admitted(connection: socket.socket, pull: Pull, holds: Holds, transport: str) -> Hold | None:
    """The hold whose blocks a receiver may have; None after it was told why it gets none."""
    hold = holds.find(pull.transfer_id)
    code = TransferCode.UNKNOWN if hold is None else foreign(hold.identity, pull.identity)
    if code is None and pull.transport != transport:
        code = TransferCode.FOREIGN_TRANSPORT
    if code is None:
        return hold
    send(connection, Declined(code))
    return None


def check_offer(wanted: Wanted, identity: Identity, block_bytes: int) -> None:
    """Raise TransferFailed unless the offered blocks are the wanted ones."""
    code = foreign(wanted.identity, identity)
    if code is None and block_bytes != wanted.block_bytes:
        code = TransferCode.FOREIGN_LAYOUT
    if code is not None:
        raise TransferFailed(code)


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    """Send one frame."""
    connection.settimeout(STALL_S)
    connection.sendall(frame(message))


def receive(connection: socket.socket, limit: int, meanwhile: Callable[[], None] | None = None) -> bytes:
    """The body of the next frame; `meanwhile` is called again and again until it is there. Raises TimeoutError after STALL_S."""
    head = np.empty(4, np.uint8)
    receive_into(connection, head, meanwhile)
    body = np.empty(frame_length(head.tobytes(), limit), np.uint8)
    receive_into(connection, body, meanwhile)
    return body.tobytes()


def receive_into(connection: socket.socket, data: Bytes, meanwhile: Callable[[], None] | None = None) -> None:
    """Fill `data` from the connection."""
    view, deadline = data.data, time.monotonic() + STALL_S
    connection.settimeout(STALL_S if meanwhile is None else TICK_S)
    while view:
        try:
            count = connection.recv_into(view)
        except TimeoutError:
            if meanwhile is None or time.monotonic() > deadline:
                raise
            meanwhile()
            continue
        if not count:
            raise ConnectionResetError("the peer hung up in the middle")
        view, deadline = view[count:], time.monotonic() + STALL_S
