"""What an instance with a role has besides a server without one. It starts nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inference.dialects.mindie.disaggregation.results import Results
from inference.dialects.mindie.disaggregation.roles import Roles

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from inference.dialects.mindie.disaggregation.peers import Peers


MAX_HELD = 4096
"""Requests whose blocks can be released by their id; workers release older ones by themselves."""


@dataclass(slots=True)
class Instance:
    """One instance. `decoding` are the ids of the requests that other instances have handed over; `tasks` are theirs, until the
    other instance knows that the request has ended; `held` release the blocks of those that this one has handed over.
    """

    peers: Peers
    port: int
    roles: Roles = field(init=False)
    results: Results = field(default_factory=Results)
    decoding: set[str] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    held: dict[str, Callable[[], None]] = field(default_factory=dict)

    def hold(self, request_id: str, release: Callable[[], None]) -> None:
        """Remember how the blocks of a request are released."""
        self.held[request_id] = release
        if len(self.held) > MAX_HELD:
            del self.held[next(iter(self.held))]

    def release(self, request_id: str) -> None:
        """Release the blocks of a request, if any are held."""
        release = self.held.pop(request_id, None)
        if release is not None:
            release()

    def __post_init__(self) -> None:
        self.roles = Roles(self.peers, self.port)
