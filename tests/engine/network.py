"""Workers behind a TCP port for tests: a core without a model, its socket loop, clients, and a link that fails."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager, closing

from engine.address import parse
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.messages import ModelInfo, RequestOutput, Stats, StepHistograms
from engine.network.credentials import Credentials
from engine.server import EngineServer
from tests.live import free_port


class Endless:
    """A core whose requests bring a token a step, without end, until their client goes."""

    blocked, failed_steps = False, 0

    def __init__(self, output_bytes: int = 0):
        self.info = ModelInfo("", "", "", "", "cpu", 8, 8, [], 16, 1, 1, 1, 0, {})
        self.stats, self.histograms = Stats(), StepHistograms()
        self.running: dict[int, int] = {}
        """Client by request."""
        self.embeddings = bytes(output_bytes) or None

    @property
    def has_work(self):
        return bool(self.running)

    def submit(self, client, message):
        self.running[message.request_id] = client

    def step(self):
        threading.Event().wait(0.01)
        return {
            client: [RequestOutput(request, [3], embeddings=self.embeddings)]
            for request, client in self.running.items()
        }

    def refresh_stats(self):
        return self.stats

    def check_integrity(self):
        pass

    def abort(self, client, request_ids):
        for request_id in request_ids:
            self.running.pop(request_id, None)

    def abort_client(self, client):
        self.running = {request: of for request, of in self.running.items() if of != client}

    def close(self):
        pass


@asynccontextmanager
async def serving(files: Credentials, core: Endless | None = None, host: str = "127.0.0.1", timeout_s: float = 30.0):
    """A worker's socket loop in a thread; its address."""
    address = f"tcp://{host}:{free_port()}"
    config = EngineConfig(model="x", address=address, tls=files, worker_id="w", epoch=3, client_timeout_s=timeout_s)
    server = EngineServer(core or Endless(), config)
    loop = threading.Thread(target=server.run)
    loop.start()
    try:
        yield address
    finally:
        server.stopping = True
        await asyncio.to_thread(loop.join)


@asynccontextmanager
async def connected(address: str, files: Credentials | None):
    client = EngineClient(address, "w", 3, credentials=files)
    try:
        await client.connect()
        yield client
    finally:
        await client.close()


class Swallower:
    """Passes bytes on between a client and a worker until it is told to swallow them; both connections stay open."""

    def __init__(self, address: str) -> None:
        self.place, self.port = parse(address), free_port()
        self.swallows = False

    async def __aenter__(self) -> Swallower:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader, writer) -> None:
        onward, back = await asyncio.open_connection(self.place.host, self.place.port)
        with closing(writer), closing(back):
            await asyncio.gather(self._pass(reader, back), self._pass(onward, writer), return_exceptions=True)

    async def _pass(self, reader, writer) -> None:
        while data := await reader.read(1 << 16):
            if not self.swallows:
                writer.write(data)
