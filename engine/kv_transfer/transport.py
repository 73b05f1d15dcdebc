"""How blocks get from one worker to another: the interface of a transport. The engine knows no more of one than this.

The receiver fetches: it names the transfer, what the blocks must be of and from which block on it lacks them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import socket

    from engine.kv_transfer.blocks import Bytes
    from engine.kv_transfer.handle import Identity, KvSource, TransferCode
    from engine.kv_transfer.holds import Holds
    from engine.kv_transfer.messages import Pull


class TransferFailed(Exception):
    """The blocks will not come; the receiver computes the prompt."""

    def __init__(self, code: TransferCode) -> None:
        super().__init__(code.value)
        self.code = code


@dataclass(frozen=True, slots=True)
class Wanted:
    """The blocks that a receiver lacks: those from `first_block` on of a sequence's first `num_tokens`."""

    identity: Identity
    num_tokens: int
    first_block: int
    num_blocks: int
    """Of the whole sequence."""
    block_bytes: int


class Sink(Protocol):
    """Takes blocks as they arrive."""

    @property
    def cancelled(self) -> bool:
        """Whether nobody wants the blocks any more."""
        ...

    def take(self, first: int, count: int, data: Bytes) -> None:
        """Blocks `first` to `first + count`, verified, in order and without gaps."""
        ...


class Transport(Protocol):
    """One way of moving blocks. Its methods run in threads of their own and may block."""

    @property
    def name(self) -> str:
        """The value of `kv_transport` that selects it; both workers need the same."""
        ...

    def fetch(self, source: KvSource, wanted: Wanted, sink: Sink) -> None:
        """Fetch the blocks and let the sender give them up; raises TransferFailed."""
        ...

    def serve(self, connection: socket.socket, pull: Pull, holds: Holds, block_bytes: int) -> None:
        """Send the blocks that a receiver asked for with its first frame, and close the connection."""
        ...
