"""Blocks by NIXL (the extra `nixl`): the receiver reads them from memory that the sender has registered for others to read.

The connection between the workers decides who may have what, as with sockets, and carries digests; NIXL moves the bytes. The sender
copies blocks into its window under their hold's lock, never lets anybody read its cache, and says what lies where (`Staged`); the receiver reads,
verifies, and says so (`Taken`), whereupon the place is filled again. After `Window` a piece of no blocks means that the sender waits.

NIXL's bytes are neither encrypted nor do its ports ask who connects. Workers on Unix sockets therefore use shared memory, which the kernel
opens to their user alone. Workers on TCP need network devices that an operator named for it.
"""

from __future__ import annotations

import threading
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec

from engine.address import parse
from engine.kv_transfer import wire
from engine.kv_transfer.handle import Identity, TransferCode
from engine.kv_transfer.holds import HoldEnded
from engine.kv_transfer.nixl_agent import Agent, AgentError
from engine.kv_transfer.transport import TransferFailed
from engine.kv_transfer.wire import Declined, Done, End
from engine.models.files import ModelError

if TYPE_CHECKING:
    import socket

    from engine.config import EngineConfig
    from engine.kv_transfer.handle import KvSource
    from engine.kv_transfer.holds import Hold, Holds
    from engine.kv_transfer.messages import Pull
    from engine.kv_transfer.nixl_agent import Slab
    from engine.kv_transfer.transport import Sink, Wanted

PLACES = 3
"""Pieces in a sender's window: one is being read, the next is filled meanwhile."""
MAX_FRAME_BYTES = 1 << 16


class Window(msgspec.Struct, array_like=True, tag=True):
    """The sender has the blocks, of `identity` and each of `block_bytes`, and will put them into the memory at `address` in its process.
    `description` is what NIXL needs to read there, and `digest` its SHA-256: NIXL is given no bytes that were changed on the way.
    """

    identity: Identity
    block_bytes: int
    address: int
    description: bytes
    digest: bytes


class Staged(msgspec.Struct, array_like=True, tag=True):
    """`count` blocks lie in the window in the place number `place`. `digest` is the SHA-256 of these."""

    first: int
    count: int
    place: int = 0
    digest: bytes = b""


class Taken(msgspec.Struct, array_like=True, tag=True):
    """The receiver has what lay in the earliest place that it had not taken."""


_from_sender = msgspec.msgpack.Decoder(Window | Declined | Staged | End)
_from_receiver = msgspec.msgpack.Decoder(Taken | Done)


class Nixl:
    """Fetches and serves by NIXL; an `engine.kv_transfer.transport.Transport`."""

    name = "nixl"

    def __init__(self, config: EngineConfig) -> None:
        """Raises ModelError."""
        remote = bool(config.address) and parse(config.address).remote
        if remote and not config.nixl_devices:
            raise ModelError(
                f"kv_transport nixl does not encrypt, and {config.address} is reached from other hosts: name the devices of a network "
                "that only this cluster uses in NIXL_DEVICES, or use kv_transport sockets"
            )
        self._credentials = config.tls
        self._devices = config.nixl_devices if remote else ""
        self._lock = threading.Lock()
        try:
            self._agent = Agent(self._devices)
        except AgentError as error:
            raise ModelError(f"kv_transport nixl: {error}") from error

    def fetch(self, source: KvSource, wanted: Wanted, sink: Sink) -> None:
        """As the interface says."""
        with wire.asking(source, wanted, self._credentials, self.name) as connection:
            window = _from_sender.decode(wire.receive(connection, MAX_FRAME_BYTES))
            if isinstance(window, Declined):
                raise TransferFailed(window.code)
            if not isinstance(window, Window) or sha256(window.description).digest() != window.digest:
                raise TransferFailed(TransferCode.MALFORMED)
            wire.check_offer(wanted, window.identity, window.block_bytes)
            piece = wire.per_piece(wanted.block_bytes) * wanted.block_bytes
            agent = self._usable()
            with agent.slab(piece) as slab, agent.peer(window.description) as peer:
                _receive(connection, wanted, sink, window, agent, slab, peer)

    def serve(self, connection: socket.socket, pull: Pull, holds: Holds, block_bytes: int) -> None:
        """As the interface says."""
        with wire.answering(connection):
            hold = wire.admitted(connection, pull, holds, self.name)
            if hold is None:
                return
            piece = wire.per_piece(block_bytes) * block_bytes
            agent = self._usable()
            with agent.slab(PLACES * piece) as slab:
                digest = sha256(slab.description).digest()
                wire.send(connection, Window(hold.identity, block_bytes, slab.address, slab.description, digest))
                _Sender(connection, hold, agent, slab, block_bytes).send(pull.first_block)
                hold.fetched()

    def _usable(self) -> Agent:
        """The agent; a new one if a read of the last one may still write into its memory. Raises OSError."""
        with self._lock:
            if self._agent.broken:
                try:
                    self._agent = Agent(self._devices)
                except AgentError as error:
                    raise ConnectionError(str(error)) from error
            return self._agent


def _receive(
    connection: socket.socket, wanted: Wanted, sink: Sink, window: Window, agent: Agent, slab: Slab, peer: str
) -> None:
    following, most = wanted.first_block, wire.per_piece(wanted.block_bytes)
    while not sink.cancelled:
        head = _from_sender.decode(wire.receive(connection, MAX_FRAME_BYTES))
        if isinstance(head, End):
            if following != wanted.num_blocks:
                raise TransferFailed(TransferCode.MALFORMED)
            wire.send(connection, Done())
            return
        fits = isinstance(head, Staged) and 0 <= head.count <= min(most, wanted.num_blocks - following)
        if not isinstance(head, Staged) or not fits or head.first != following or not 0 <= head.place < PLACES:
            raise TransferFailed(TransferCode.MALFORMED)
        if head.count:
            size = head.count * wanted.block_bytes
            agent.read(connection, peer, window.address + head.place * most * wanted.block_bytes, slab, size)
            data = slab.data[:size].copy()  # nothing changes what has been verified
            wire.send(connection, Taken())
            if sha256(data.data).digest() != head.digest:
                raise TransferFailed(TransferCode.DAMAGED)
            sink.take(following, head.count, data)
            following += head.count


class _Sender:
    """One transfer's side that fills a window."""

    def __init__(self, connection: socket.socket, hold: Hold, agent: Agent, slab: Slab, block_bytes: int) -> None:
        self._connection, self._hold, self._agent, self._slab = connection, hold, agent, slab
        self._block_bytes, self._most = block_bytes, wire.per_piece(block_bytes)
        self._filled = 0
        """Places that the receiver has not taken."""

    def send(self, first: int) -> None:
        """Send the blocks from number `first` on, until the receiver has them all."""
        try:
            self._fill(first)
        except HoldEnded:  # no other transfer fills a place that is being read
            while self._filled:
                self._wait()
            raise
        wire.send(self._connection, End())
        while self._filled:
            self._wait()
        if not isinstance(self._heard(), Done):
            raise msgspec.ValidationError("Done was expected")

    def _fill(self, first: int) -> None:
        place = 0
        while first < self._hold.announced.num_blocks:
            if self._filled == PLACES:
                self._wait()
            # While a piece is being read, somebody must answer; else there is time to wait for the next block.
            patience = 0.0 if self._filled else wire.BEAT_S
            begin = place * self._most * self._block_bytes
            data = self._hold.read(first, self._most, patience, self._slab.data[begin:])
            if data is None and self._filled:
                self._wait()
            elif data is None:
                wire.send(self._connection, Staged(first, 0))
            else:
                count = len(data) // self._block_bytes
                wire.send(self._connection, Staged(first, count, place, sha256(data.data).digest()))
                self._filled += 1
                first, place = first + count, (place + 1) % PLACES

    def _wait(self) -> None:
        """Until the receiver has taken a place."""
        if not isinstance(self._heard(), Taken):
            raise msgspec.ValidationError("Taken was expected")
        self._filled -= 1

    def _heard(self) -> Taken | Done:
        heard: Taken | Done = _from_receiver.decode(
            wire.receive(self._connection, MAX_FRAME_BYTES, self._agent.progress)
        )
        return heard
