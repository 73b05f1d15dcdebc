"""The planes over a fake worker in this process, called as a `LiveServer` is: for answers that need no model.

Requests enter at the planes' ASGI applications and take the real route tables, so nothing of `inference.server` is
tested here: no sockets, no limits of a body's size, no timeouts of connections.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx

from tests.unit.serving import Answer, Serving, fake_workers
from tests.waiting import PATIENCE_S

PLANES = {8000: "front", 1025: "mindie", 1026: "management", 1027: "metrics"}
"""By the port of a call's URL, on which nothing listens."""


class InProcessServer(httpx.BaseTransport):
    """One deployment, "demo", whose fake worker answers with the last tokens of each prompt."""

    url = "http://127.0.0.1:8000"
    mindie_url = "http://127.0.0.1:1025"
    management_url = "http://127.0.0.1:1026"
    metrics_url = "http://127.0.0.1:1027"

    def __init__(self) -> None:
        self.client = httpx.Client(transport=self)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="in-process-server", daemon=True)

    def start(self) -> InProcessServer:
        """Serve until `stop`."""
        self._folder = tempfile.TemporaryDirectory(prefix="dragoman-")  # a Unix socket's path is short
        self._thread.start()
        self.serving = self.run(self._begin())
        return self

    def stop(self) -> None:
        """Hang up, and end the thread."""
        try:
            self.run(self._end())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(PATIENCE_S)
            self._loop.close()
            self._folder.cleanup()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of what ran on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def post(self, path: str, body: object, **options: Any) -> httpx.Response:
        """The whole answer of the front plane."""
        content = body if isinstance(body, bytes | str) else json.dumps(body)
        return self.client.post(f"{self.url}{path}", content=content, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        """The whole answer of the front plane."""
        return self.client.get(f"{self.url}{path}", **options)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """httpx's transport: the plane is the port's, as in a server."""
        answer = self.run(self._call(request))
        return httpx.Response(answer.status, headers=answer.headers, content=answer.body)

    async def _begin(self) -> Serving:
        serving = await Serving(fake_workers(Path(self._folder.name), 1)).start()
        self._beating = asyncio.create_task(self._beat(serving))
        return serving

    async def _beat(self, serving: Serving) -> None:
        """As an engine that has nothing to do: its clients take one that says nothing for lost."""
        while True:
            serving.worker.beat()
            await asyncio.sleep(1)

    async def _end(self) -> None:
        self._beating.cancel()
        await self.serving.stop()

    async def _call(self, request: httpx.Request) -> Answer:
        headers = {k.decode(): v.decode("latin-1") for k, v in request.headers.raw}
        target = request.url.raw_path.decode()
        plane = PLANES[request.url.port or 80]
        return await self.serving.begin(target, request.read(), plane=plane, method=request.method, **headers).end()
