"""The role of an instance, its changes, and its links to other instances. It handles no request."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from inference.dialects.mindie.errors import MindieError

if TYPE_CHECKING:
    from inference.dialects.mindie.disaggregation.peers import Peers

LOOK_EVERY_S = 10.0
PD_INFO = "Update pd info failed. Reset to previous node status."


class Role(StrEnum):
    """What an instance does."""

    NONE = "none"
    PREFILL = "prefill"
    DECODE = "decode"
    FLEX = "flex"


class RoleStatus(StrEnum):
    """Whether the role acts."""

    READY = "RoleReady"
    SWITCHING = "RoleSwitching"
    UNKNOWN = "RoleUnknown"
    """No role has been set."""


@dataclass(frozen=True, slots=True)
class Node:
    """An instance's part: one in version 1 of the API, one for each data-parallel rank in version 2.

    `host` is `server_ip`: a controller calls an instance there, and a coordinator names it in `d-target`.
    `instance` is None where version 1 leaves it out; `rank` numbers the parts of an instance.
    """

    host: str
    instance: int | None
    rank: int = 0
    port: int | None = None
    """Where its gRPC services listen; None: on this instance's own port number."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a controller asks for. `percentage` is the share of prefills of a flexible instance."""

    role: Role
    local: tuple[Node, ...]
    addresses: frozenset[str]
    """The addresses of the instance itself."""
    peers: tuple[Node, ...]
    percentage: int | None = None


class Roles:
    """The role of this instance; changes take effect at once, links are made afterwards."""

    def __init__(self, peers: Peers, port: int, look_every_s: float = LOOK_EVERY_S) -> None:
        """`port` is that of this instance's gRPC services."""
        self.role, self.status, self.percentage = Role.NONE, RoleStatus.UNKNOWN, 0
        self.port = port
        self._peers, self._look_every_s = peers, look_every_s
        self._instance: int | None = None
        self._host = ""
        self._addresses: frozenset[str] = frozenset()
        self._links: dict[Node, int | None] = {}
        """What the last attempt returned; None: none has ended."""
        self._watch: asyncio.Task[None] | None = None

    @property
    def instance(self) -> int:
        """The instance's number, 0 without one."""
        return self._instance or 0

    @property
    def address(self) -> str:
        """Where other instances reach this one; "" before it has a role."""
        return f"{self._host};{self.port}" if self._host else ""

    def is_peer(self, host: str, port: int) -> bool:
        """Whether another instance that this one was told of has the address."""
        return (host, port) in map(self._address_of, self._links)

    @property
    def prefills(self) -> bool:
        """Whether inference requests may be sent to this instance."""
        return self.role is Role.PREFILL or (self.role is Role.FLEX and self.percentage > 0)

    @property
    def decodes(self) -> bool:
        """Whether other instances may hand requests over to this one."""
        return self.role in (Role.DECODE, Role.FLEX)

    @property
    def unhealthy(self) -> bool:
        """Whether every link has been tried and none is good."""
        tried = [code for code in self._links.values() if code is not None]
        return bool(tried) and len(tried) == len(self._links) and 0 not in tried

    def is_self(self, host: str, port: int) -> bool:
        """Whether the address is this instance's own."""
        return port == self.port and host in self._addresses

    def assign(self, order: Order) -> None:
        """Take a role and its peers. Raises MindieError and changes nothing where that is not possible from the present role."""
        first = self.role is Role.NONE
        if first and any(node.instance is None for node in (*order.local, *order.peers)):
            raise MindieError(503, PD_INFO)
        alone = order.role is Role.FLEX and order.percentage not in (0, 100)
        if first and not order.peers and not alone:
            raise MindieError(503, PD_INFO)
        if not first and Role.FLEX in (self.role, order.role) and self.role is not order.role:
            raise MindieError(503, PD_INFO)
        peers = [self._known(node) for node in order.peers]
        kept = self._links if self.role is order.role else {}
        self._links = {node: kept.get(node) for node in peers}
        self.role, self._addresses, self._host = order.role, order.addresses, order.local[0].host
        self.percentage = self.percentage if order.percentage is None else order.percentage
        self._instance = next((n.instance for n in order.local if n.instance is not None), self._instance)
        self.status = RoleStatus.SWITCHING
        self._settle()
        if self._watch is not None:
            self._watch.cancel()
        self._watch = asyncio.create_task(self._keep_linked())

    def links(self, by_instance: bool) -> list[dict[str, Any]]:
        """The links whose attempts have ended, as the status endpoints list them; `by_instance`: one for each instance all of
        whose links are good.
        """
        if not by_instance:
            return [
                {"target": n.instance, "link": _worded(code)} for n, code in self._links.items() if code is not None
            ]
        instances = dict.fromkeys(node.instance for node in self._links)
        good = [i for i in instances if all(code == 0 for node, code in self._links.items() if node.instance == i)]
        return [{"target": instance, "link": "ok"} for instance in good]

    async def close(self) -> None:
        """Watch no longer."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    def _address_of(self, node: Node) -> tuple[str, int]:
        return node.host, node.port or self.port

    def _known(self, node: Node) -> Node:
        """A peer with the number that was told earlier, if it has none now; raises MindieError."""
        if node.instance is not None:
            return node
        for known in self._links:
            if known.host == node.host:
                return known
        raise MindieError(503, PD_INFO)

    async def _keep_linked(self) -> None:
        while True:
            await self._peers.refresh()
            nodes = list(self._links)
            await asyncio.gather(self._peers.keep(map(self._address_of, nodes)), *map(self._try, nodes))
            await asyncio.sleep(self._look_every_s)

    async def _try(self, node: Node) -> None:
        code = await self._peers.probe(*self._address_of(node))
        if node in self._links:
            self._links[node] = code
            self._settle()

    def _settle(self) -> None:
        """The role acts as soon as nothing is linking and a link is good, or if there is nothing to link."""
        codes = self._links.values()
        if None not in codes and (0 in codes or not self._links):
            self.status = RoleStatus.READY


def _worded(code: int) -> str:
    return "ok" if code == 0 else f"failed : {code}"
