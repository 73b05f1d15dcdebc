"""Two instances of MindIE in the test's own process: one prefills, one decodes, each over its own fake worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from inference.dialects.mindie.disaggregation.decode import services_of
from inference.dialects.mindie.disaggregation.instance import Instance
from inference.dialects.mindie.disaggregation.peers import Peers
from inference.server.grpc_calls import Timeouts
from tests.coordinator import Messages
from tests.live import free_port
from tests.unit.serving import Answer, Call, Serving, fake_workers
from tests.waiting import eventually

DEVICE = {"device_id": "0", "device_ip": "29.0.0.1", "device_logical_id": "0", "rank_id": "0"}


def node(number: int, port: int | None = None) -> dict[str, Any]:
    """A node of a role's body, on loopback."""
    made = {"server_ip": "127.0.0.1", "host_ip": "127.0.0.1", "id": number, "device": [DEVICE]}
    return made if port is None else {**made, "inter_comm_port": port}


class Member:
    """One instance."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        folder.mkdir()
        self.serving = Serving(fake_workers(folder, 1), **settings)
        self.port = free_port()
        self.instance = self.serving.mindie.instance = Instance(Peers(), self.port)
        self._server = grpc.aio.server()

    async def start(self) -> Member:
        handlers = services_of(self.serving.mindie, self.instance, self.serving.services, Timeouts(30, 30), "infer")
        self._server.add_generic_rpc_handlers(handlers)
        self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()
        await self.serving.start()
        return self

    async def stop(self) -> None:
        await self.instance.roles.close()
        await self.instance.peers.close()
        await self._server.stop(0)
        for task in list(self.instance.tasks):
            task.cancel()
        await self.serving.stop()

    async def become(self, role: str, number: int, *peers: dict[str, Any]) -> Answer:
        """Take a role."""
        body = {"local": node(number), "peers": list(peers)}
        return await self.serving.post(f"/v1/role/{role}", body, plane="management")

    async def status(self) -> dict[str, Any]:
        """GET /v1/status."""
        status: dict[str, Any] = (await self.serving.get("/v1/status", plane="management")).json()
        return status


@dataclass
class Results:
    """A reader of /dresult."""

    call: Call
    messages: Messages = field(default_factory=Messages)
    found: list[tuple[str, str, bytes]] = field(default_factory=list)
    _read: int = 0

    def take(self) -> list[tuple[str, str, bytes]]:
        """All messages so far."""
        chunks = self.call.answer.chunks
        for chunk in chunks[self._read :]:
            assert chunk.endswith(b"\0")
            self.found += self.messages.feed(chunk)
        self._read = len(chunks)
        return self.found

    async def until_last(self, request_id: str) -> list[tuple[str, bytes]]:
        """The (keyword, payload) of a request that has ended."""
        await eventually(lambda: any(m[0] == request_id and m[1] not in ("data",) for m in self.take()))
        return [(keyword, payload) for name, keyword, payload in self.found if name == request_id]


@dataclass
class Pair:
    """Both, with their roles."""

    prefill: Member
    decode: Member

    @property
    def target(self) -> str:
        return f"127.0.0.1;{self.decode.port}"

    async def link(self) -> None:
        """Give out the roles, and wait for the links."""
        await self.prefill.become("prefill", 1, node(2, self.decode.port))
        await self.decode.become("decode", 2, node(1, self.prefill.port))
        await eventually(lambda: all(m.instance.roles.status == "RoleReady" for m in (self.prefill, self.decode)))

    def begin(self, path: str, body: object, request_id: str = "1", **headers: str) -> Call:
        """A request to the instance that prefills."""
        named = {"req_type": "prefill", "req_id": request_id, "d_target": self.target, **headers}
        return self.prefill.serving.begin(path, body, plane="mindie", **named)

    async def ask(self, path: str, body: object, request_id: str = "1", **headers: str) -> Answer:
        """Its whole answer."""
        return await self.begin(path, body, request_id, **headers).end()

    def read(self) -> Results:
        """GET /dresult."""
        return Results(self.decode.serving.begin("/dresult", plane="mindie", method="GET"))
