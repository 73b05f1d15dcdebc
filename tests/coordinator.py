"""What a coordinator of MindIE does with prefill and decode instances, after the vendor's: forwards a client's request to the
one, reads the results of the other, and tells the client the first one's output before the other's. `FrontDoor` is where clients come in.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import h11
import httpx

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

PATIENCE_S = 60.0


class Messages:
    """Reads /dresult as the vendor's coordinator does: whole chunks, cut at NUL, the keyword before the first colon."""

    def __init__(self) -> None:
        self.heartbeats = 0

    def feed(self, chunk: bytes) -> list[tuple[str, str, bytes]]:
        """The (id, keyword, payload) of a chunk's messages; what follows its last NUL is lost."""
        found, request_id = [], ""
        for part in chunk.split(b"\0")[:-1]:
            keyword, colon, payload = part.partition(b":")
            if not colon or not payload:
                continue
            if keyword == b"reqId":
                request_id = payload.decode()
            elif keyword == b"ka":
                self.heartbeats += 1
            else:
                found.append((request_id, keyword.decode(), payload))
        return found


@dataclass(frozen=True)
class Told:
    """A part of an answer."""

    status: int
    content: bytes
    streamed: bool = False
    again: bool = False
    """Whether it is the first part after an instance gave the request back."""


@dataclass
class Answer:
    """What the client gets."""

    status: int
    chunks: list[bytes] = field(default_factory=list)
    retries: int = 0

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    def json(self) -> Any:
        return json.loads(self.body)


class Coordinator:
    """For one instance that prefills and one that decodes."""

    def __init__(self, prefill_url: str, decode_url: str, target: str) -> None:
        """`target` is the value of the header `d-target`."""
        self.prefill_url, self.decode_url, self.target = prefill_url, decode_url, target
        self.messages = Messages()
        self.closed = ""
        self._client = httpx.AsyncClient(timeout=PATIENCE_S)
        self._ids = itertools.count(1000)
        self._queues: defaultdict[str, asyncio.Queue[tuple[str, bytes]]] = defaultdict(asyncio.Queue)
        self._reading: asyncio.Task[None] | None = None
        self.connected = asyncio.Event()
        self.lost = asyncio.Event()

    async def __aenter__(self) -> Coordinator:
        self._reading = asyncio.create_task(self._read())
        async with asyncio.timeout(PATIENCE_S):
            await self.connected.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._reading is not None
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._client.aclose()

    async def _read(self) -> None:
        try:
            async with self._client.stream("GET", self.decode_url + "/dresult") as response:
                assert response.status_code == 200, await response.aread()
                assert response.headers["content-type"] == "text/event-stream"
                self.connected.set()
                rest = b""
                async for raw in response.aiter_raw():
                    # httpx may cut where the server did not; a message is whole at a NUL.
                    whole, nul, rest = (rest + raw).rpartition(b"\0")
                    for request_id, keyword, payload in self.messages.feed(whole + nul):
                        if keyword == "close":
                            self.closed = payload.decode()
                            return
                        self._queues[request_id].put_nowait((keyword, payload))
        except httpx.HTTPError:
            pass
        finally:
            self.lost.set()

    def new_id(self) -> str:
        """The next request id."""
        return str(next(self._ids))

    async def forward(
        self, path: str, body: bytes, request_id: str, recompute: bool = False, **headers: str
    ) -> httpx.Response:
        """What the instance that prefills answers."""
        named = {"req-type": "prefill", "req-id": request_id, "d-target": self.target, "d-port": "1025"}
        if recompute:
            named["is-recompute"] = "true"
        return await self._client.post(self.prefill_url + path, content=body, headers={**named, **headers})

    async def ask(self, path: str, body: Any, results_id: str = "", request_id: str = "") -> Answer:
        """The whole answer to a client; `results_id` is the id under which Triton's texts come."""
        answer = Answer(200)
        async for told in self.answers(path, json.dumps(body).encode(), request_id or self.new_id(), results_id):
            answer.status = told.status
            answer.retries += told.again
            answer.chunks.append(told.content)
        return answer

    async def answers(
        self, path: str, content: bytes, request_id: str, results_id: str = ""
    ) -> AsyncGenerator[Told, None]:
        """What a client is told, as it comes."""
        queue, again = self._queues[results_id or request_id], False
        while True:
            first = await self.forward(path, content, request_id, again)
            if first.status_code != 200:
                yield Told(first.status_code, first.content)
                return
            told = first.json()
            assert told["reqId"] == request_id
            yield Told(200, told.get("output", "").encode(), told["isStream"], again)
            if told.get("isLastResp"):
                return
            keyword = "data"
            while keyword == "data":
                async with asyncio.timeout(PATIENCE_S):
                    keyword, content = await queue.get()
                if keyword != "retry":
                    yield Told(500 if keyword == "error" else 200, content, told["isStream"])
            if keyword != "retry":
                return
            again = True

    async def stop(self, path: str, request_id: str) -> None:
        """Stop a request whose client has gone, at both instances."""
        for url in (self.decode_url, self.prefill_url):
            await self._client.post(url + path, json={"id": request_id}, headers={"req-id": request_id})


class FrontDoor:
    """The coordinator's port for inference, on loopback: one request a connection."""

    def __init__(self, coordinator: Coordinator, model: str) -> None:
        self._coordinator, self._stop_path = coordinator, f"/v2/models/{model}/stopInfer"
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> FrontDoor:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire, body, request = h11.Connection(h11.SERVER), b"", None
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            while not isinstance(event := wire.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    wire.receive_data(await reader.read(1 << 16))
                elif isinstance(event, h11.Request):
                    request = event
                elif isinstance(event, h11.Data):
                    body += event.data
                else:
                    return
            assert request is not None
            request_id = self._coordinator.new_id()
            gone = asyncio.create_task(reader.read(1))
            answers = self._coordinator.answers(request.target.decode(), body, request_id)
            begun = False
            try:
                while not gone.done():
                    following = asyncio.ensure_future(anext(answers, None))
                    await asyncio.wait((following, gone), return_when=asyncio.FIRST_COMPLETED)
                    if not following.done():
                        following.cancel()
                        await asyncio.gather(following, return_exceptions=True)
                        break
                    told = following.result()
                    if told is None:
                        writer.write(wire.send(h11.EndOfMessage()) or b"")
                        return
                    # A whole answer comes last, and with it its status.
                    if not begun and (told.content or told.streamed):
                        kind = "text/event-stream" if told.streamed else "application/json"
                        headers = [("content-type", kind), ("connection", "close"), ("transfer-encoding", "chunked")]
                        writer.write(wire.send(h11.Response(status_code=told.status, headers=headers)) or b"")
                        begun = True
                    if told.content:
                        writer.write(wire.send(h11.Data(data=told.content)) or b"")
                    await writer.drain()
                await self._coordinator.stop(self._stop_path, request_id)
            finally:
                gone.cancel()
                await answers.aclose()
