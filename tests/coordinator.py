"""What a coordinator of MindIE does with prefill and decode instances, after the vendor's: forwards a client's request to the
one, reads the results of the other, and tells the client the first one's output before the other's.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import httpx

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
        request_id = request_id or self.new_id()
        content, answer = json.dumps(body).encode(), Answer(200)
        recompute = False
        while True:
            first = await self.forward(path, content, request_id, recompute)
            if first.status_code != 200:
                return Answer(first.status_code, [first.content])
            told = first.json()
            assert told["reqId"] == request_id
            if told.get("output"):
                answer.chunks.append(told["output"].encode())
            if told.get("isLastResp"):
                return answer
            again = await self._relay(answer, results_id or request_id)
            if again is None:
                return answer
            content, recompute = again, True
            answer.retries += 1

    async def _relay(self, answer: Answer, request_id: str) -> bytes | None:
        """Pass results on; the body to send again if there is one."""
        queue = self._queues[request_id]
        while True:
            async with asyncio.timeout(PATIENCE_S):
                keyword, payload = await queue.get()
            if keyword == "retry":
                return payload
            answer.chunks.append(payload)
            if keyword == "error":
                answer.status = 500
            if keyword in ("lastData", "error"):
                return None
