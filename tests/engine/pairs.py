"""Two engines in one process, and the door by which one fetches blocks from the other."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from engine import messages
from engine.core import EngineCore
from engine.kv_transfer.handle import Identity, KvSource, new_transfer_id
from engine.kv_transfer.messages import Fetch, Pull
from engine.kv_transfer.nixl import Staged, Window
from engine.kv_transfer.sockets import Offer, Piece
from engine.kv_transfer.transports import TRANSPORTS
from engine.messages import FrameBuffer, RequestOutput, Submit
from engine.sampling.params import SamplingParams
from tests.engine.engines import CLIENT, Driver
from tests.waiting import wait_until


@pytest.fixture(scope="module", params=list(TRANSPORTS))
def transport(request):
    """The name of each transport; those whose package is missing are skipped."""
    if request.param == "nixl":
        pytest.importorskip("nixl", reason="the extra nixl is not installed")
    return request.param


def offer(engine: EngineCore, identity: Identity, block_bytes: int) -> msgspec.Struct:
    """What a sender with the engine's transport says first."""
    transport = engine.transfers._transport
    if transport.name == "sockets":
        return Offer(identity, block_bytes)
    with transport._usable().slab(8 * block_bytes) as slab:
        description = slab.description
    return Window(identity, block_bytes, slab.address, description, sha256(description).digest())


def piece(engine: EngineCore, first: int, count: int) -> msgspec.Struct:
    """What it says of a piece."""
    return (Piece if engine.transfers._transport.name == "sockets" else Staged)(first, count)


class Door:
    """Takes connections at an engine's address as `EngineServer` does, and passes them to its transfers."""

    def __init__(self, engine: EngineCore, path: Path) -> None:
        self.engine = engine
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self.pulls: list[Pull] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                buffer, bodies = FrameBuffer(), []
                while not bodies:
                    bodies = buffer.feed(connection.recv(4096))
                self.pulls.append(messages.to_worker.decode(bodies[0]))
                self.engine.transfers.serve(connection, self.pulls[-1])


class Held(Driver):
    """A driver whose requests may be held, or go on from a source."""

    def ask(
        self,
        prompt: list[int],
        *,
        generated: list[int] | None = None,
        hold: str = "",
        source: KvSource | None = None,
        adapter=None,
        salt: str = "",
        request_id: int = 0,
        **params: object,
    ) -> None:
        """Submit; `run` follows."""
        sampling = SamplingParams(**{"max_tokens": 16, "temperature": 0.0, **params})
        message = Submit(
            request_id,
            prompt,
            sampling,
            cache_salt=salt,
            adapter=adapter,
            generated=generated or [],
            hold=hold,
            source=source,
        )
        assert self.engine.submit(CLIENT, message) is None

    def fetch(self, source: KvSource, prompt: list[int], salt: str, adapter: str = "") -> None:
        """Fetch blocks ahead of their request."""
        self.engine.transfers.fetch(Fetch(source, prompt, adapter, salt))

    def whole(self, request_id: int = 0) -> tuple[list[int], list[object], RequestOutput]:
        """Its tokens, log-probabilities and last output."""
        outputs = self.outputs.pop(request_id)
        logprobs = [(e.token_id, e.logprob, e.rank, e.top) for o in outputs for e in o.logprobs or []]
        return [token for o in outputs for token in o.token_ids], logprobs, outputs[-1]

    def alone(self, prompt: list[int], **asked: object):
        """A request from its beginning to its end here."""
        self.ask(prompt, **asked)
        self.run()
        return self.whole()


def joined(prefill: Held, decode: Held, prompt: list[int], generated: list[int] | None = None, **asked: object):
    """A request whose prompt one engine computes and that another ends."""
    before = decode.engine.transfers.num_fetched_blocks
    first, logprobs, end = prefill.alone(prompt, generated=generated, hold=new_transfer_id(), **asked)
    if end.source is None:
        return first, logprobs, end, 0
    assert len(first) == 1
    rest, more, last = decode.alone(prompt, generated=[*(generated or []), *first], source=end.source, **asked)
    return first + rest, logprobs + more, last, decode.engine.transfers.num_fetched_blocks - before


def idle(engine: EngineCore) -> None:
    """Until every block is free, which a sending thread may have to say first."""

    def free() -> bool:
        engine.refresh_stats()
        return engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable

    wait_until(free)
    engine.check_integrity()
