"""A worker that computes nothing: it speaks `engine.messages` over a Unix socket and says what its scripts tell it to.

In a test it runs on the test's own event loop, so that all happens in one order: a step is taken when everything that
was ready has run, and no clock is looked at. `python -m tests.unit.fake_worker` is the same behind the pipes of
`engine.__main__`, for launchers. It imports no torch.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from engine import messages
from engine.config import EngineConfig
from engine.failures import ExitStatus, Failure, FailureCode, FinishReason
from engine.kv_transfer.messages import Fetch, Release
from engine.messages import (
    PROTOCOL_VERSION,
    Abort,
    AdapterCommand,
    Dead,
    Embed,
    FrameBuffer,
    Heartbeat,
    Hello,
    ModelInfo,
    Outputs,
    Ready,
    Refused,
    Reply,
    RequestOutput,
    Stats,
    Submit,
)
from management.snapshot import WorkerRole
from tests.unit.scripts import DIMENSIONS, Script, Sequence, failed, model_info

SETTLE_TURNS = 50
"""Turns of the event loop in which whatever is ready runs to its end: a frame's way from socket to client takes about ten."""


@dataclass(eq=False)
class _Connection:
    """One client."""

    writer: asyncio.StreamWriter
    buffer: FrameBuffer = field(default_factory=FrameBuffer)
    greeted: bool = False

    def send(self, message: messages.ToClient) -> None:
        if not self.writer.is_closing():
            self.writer.write(messages.frame(message))


class FakeWorker:
    """Serves at `path` from `start` to `close`.

    Requests take the `scripts` in the order in which they come, and then `default`. What came in can be read from
    `hellos`, `submits`, `embeds`, `commands`, `aborted` and `released`.
    """

    def __init__(
        self, path: str | Path, worker_id: str = "demo/0", epoch: int = 1, info: ModelInfo | None = None
    ) -> None:
        self.path, self.worker_id, self.epoch, self.info = str(path), worker_id, epoch, info or model_info()
        self.scripts: deque[Script] = deque()
        self.default = Script()
        self.replies: dict[str, str] = {}
        """By an adapter command's action: why it is not carried out."""
        self.by_seed: dict[int, Script] = {}
        """Scripts of requests with these seeds, before all others."""
        self.embed_failure: Failure | None = None
        self.dies_of_embeddings = False
        self.model_version = 1
        self.numerics = ""
        """What the registries say that it serves, and how."""
        self.silent = False
        """Takes everything in and says nothing."""
        self.draining = False
        self.hellos: list[Hello] = []
        self.submits: list[Submit] = []
        self.embeds: list[Embed] = []
        self.commands: list[AdapterCommand] = []
        self.aborted: list[int] = []
        self.released: list[str] = []
        """Transfers whose blocks it may give up."""
        self.fetches: list[Fetch] = []
        """Blocks that it may have before their request."""
        self.role = WorkerRole.BOTH
        self.stats = Stats(blocks_total=self.info.num_blocks)
        self._running: dict[tuple[_Connection, int], Sequence] = {}
        self._connections: list[_Connection] = []
        self._happened = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._steps: asyncio.Task[None] | None = None

    async def start(self) -> FakeWorker:
        """Listen."""
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        self._steps = asyncio.create_task(self._step_for_ever())
        return self

    async def close(self) -> None:
        """End as a worker that was told to."""
        if self._steps is not None:
            self._steps.cancel()
            await asyncio.gather(self._steps, return_exceptions=True)
        self.die()
        for connection in list(self._connections):
            connection.writer.transport.abort()  # what is unsent must not outlive the event loop
            with suppress(OSError):
                await connection.writer.wait_closed()

    def die(self, last_words: str | None = None) -> None:
        """Listen no more and hang up, with `last_words` if there are any."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            if last_words is not None:
                connection.send(Dead(last_words))
            connection.writer.close()
        self._running.clear()

    def beat(self) -> None:
        """A heartbeat to every client."""
        self._broadcast(Heartbeat(self.stats, self.draining))

    def drain(self) -> None:
        """Take no more requests, and say so."""
        self.draining = True
        self.beat()

    def hand_over(self) -> None:
        """End every request as moved."""
        self.drain()
        for connection, request_id in self._running:
            self._say(connection, RequestOutput(request_id, finish_reason=FinishReason.MOVED))
        self._running.clear()

    def go_on(self) -> None:
        """Look again at what was waiting: a gate was opened, or `silent` has changed."""
        self._happened.set()

    def _broadcast(self, message: messages.ToClient) -> None:
        for connection in self._connections:
            if connection.greeted and not self.silent:
                connection.send(message)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(writer)
        self._connections.append(connection)
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                for body in connection.buffer.feed(data):
                    self._take(connection, messages.to_worker.decode(body))
        self._connections.remove(connection)
        for key in [key for key in self._running if key[0] is connection]:
            self.aborted.append(key[1])
            del self._running[key]
        writer.close()

    def _take(self, connection: _Connection, message: messages.ToWorker) -> None:
        if isinstance(message, Hello):
            self._greet(connection, message)
        elif isinstance(message, Submit):
            self.submits.append(message)
            if self.draining:
                self._say(connection, failed(message.request_id, Failure(FailureCode.DRAINING)))
                return
            script = self.by_seed.get(message.params.seed)
            script = script or (self.scripts.popleft() if self.scripts else self.default)
            script.gate.worker = self
            sequence = Sequence(message, script, self.info.vocab_size)
            self._running[connection, message.request_id] = sequence
            self._happened.set()
        elif isinstance(message, Embed):
            self.embeds.append(message)
            if self.dies_of_embeddings:
                self.die()
                return
            self._say(connection, self._embedded(message))
        elif isinstance(message, AdapterCommand):
            self.commands.append(message)
            if not self.silent:
                connection.send(Reply(message.call_id, self.replies.get(message.action)))
        elif isinstance(message, Fetch):
            self.fetches.append(message)
        elif isinstance(message, Release):
            self.released += message.transfer_ids
        elif isinstance(message, Abort):
            for request_id in message.request_ids:
                self.aborted.append(request_id)
                self._running.pop((connection, request_id), None)

    def _greet(self, connection: _Connection, hello: Hello) -> None:
        self.hellos.append(hello)
        mine = (PROTOCOL_VERSION, self.worker_id, self.epoch)
        if (hello.protocol, hello.worker_id, hello.epoch) == mine:
            connection.greeted = True
            connection.send(Ready(*mine, self.info))
        else:
            connection.send(Refused(*mine))

    def _embedded(self, message: Embed) -> RequestOutput:
        """Vectors of counts: the ids' sum, their number, and ones."""
        failure = self.embed_failure or (Failure(FailureCode.DRAINING) if self.draining else None)
        if failure is not None:
            return failed(message.request_id, failure)
        rows = np.ones((len(message.inputs), DIMENSIONS), "<f4")
        rows[:, 0], rows[:, 1] = [sum(ids) for ids in message.inputs], [len(ids) for ids in message.inputs]
        rows = rows[:, : message.dimensions]
        if message.normalise:
            rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        return RequestOutput(message.request_id, finish_reason=FinishReason.STOP, embeddings=rows.tobytes())

    def _say(self, connection: _Connection, *outputs: RequestOutput) -> None:
        if not self.silent:
            connection.send(Outputs(list(outputs), self.stats))

    async def _step_for_ever(self) -> None:
        while True:
            await settle()
            self._happened.clear()
            if not self._step():
                await self._happened.wait()

    def _step(self) -> bool:
        """Every sequence one step on; False where all of them wait."""
        ready = [] if self.silent else [(key, s) for key, s in self._running.items() if not s.held]
        dying = next((s for _, s in ready if s.dies), None)
        if dying is not None:
            self.die(dying.script.last_words)
            return False
        outputs: dict[_Connection, list[RequestOutput]] = {}
        for (connection, request_id), sequence in ready:
            output = sequence.output(self.info.eos_token_ids)
            outputs.setdefault(connection, []).append(output)
            self.stats.generation_tokens += len(output.token_ids)
            if output.cached_tokens is not None:
                self.stats.prompt_tokens += len(sequence.submit.prompt_token_ids)
            if output.finish_reason is not None:
                del self._running[connection, request_id]
        self.stats.running = len(self._running)
        self.stats.steps += bool(ready)
        for connection, said in outputs.items():
            self._say(connection, *said)
        return bool(ready)


async def settle() -> None:
    """Let everything run that is ready, and everything that becomes ready by that."""
    for _ in range(SETTLE_TURNS):
        await asyncio.sleep(0)


async def _serve_process(config: EngineConfig, report: Callable[..., None]) -> None:
    """The main loop of a worker process: heartbeats, and an end by SIGTERM or by EOF on stdin."""
    worker = await FakeWorker(config.address.removeprefix("unix:"), config.worker_id, config.epoch).start()
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, ended.set)

    def watch() -> None:
        sys.stdin.buffer.read()
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=watch, daemon=True).start()
    report("ready")
    while not ended.is_set():
        worker.beat()
        report("alive", doing="waiting for requests", quiet_s=0.0, patience_s=60.0)
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), 0.2)
    await worker.close()


def main() -> int:
    """What `engine.__main__` does, as the last part of the model's name says: "refused", "crashes", "hangs", or serving."""
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)

    def report(state: str, **details: object) -> None:
        os.write(1, json.dumps({"state": state, **details}).encode() + b"\n")

    report("loading", doing="reading a script")
    kind = Path(config.model).name
    if kind == "refused":
        report("failed", reason="this model is none")
        return ExitStatus.MODEL_REFUSED
    if kind == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "hangs":
        report("ready")
        report("alive", doing="computing a step", quiet_s=100.0, patience_s=1.0)
        sys.stdin.buffer.read()
    asyncio.run(_serve_process(config, report))
    report("exited", reason="stopped")
    return ExitStatus.STOPPED


if __name__ == "__main__":
    sys.exit(main())
