"""Two engines in one process, and the door by which one fetches blocks from the other."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from pathlib import Path

from engine import messages
from engine.core import EngineCore
from engine.kv_transfer.handle import KvSource, new_transfer_id
from engine.kv_transfer.messages import Fetch, Pull
from engine.messages import FrameBuffer, RequestOutput, Submit
from engine.sampling.params import SamplingParams
from tests.engine.engines import CLIENT, Driver
from tests.waiting import wait_until


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
