"""One streamed request to OpenAI's completions API, with the time of each piece of text. It never retries.

It parses with h11 and msgspec, because it shares the machine with the server that it measures.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass

import h11
import msgspec

PATH = "/v1/completions"
CONNECT_TIMEOUT_S = 10.0


class AnswerError(Exception):
    """The request got no whole answer of the length that it asked for."""


@dataclass(frozen=True)
class Question:
    """A prompt as token ids, the same prompt as text, and the number of tokens to answer with."""

    prompt: list[int]
    text: str
    tokens: int


@dataclass(frozen=True)
class Address:
    """Where a server is, and what it understands."""

    port: int
    model: str
    plain: bool = False
    """It takes only text, and knows neither `ignore_eos` nor `stream_options`."""


@dataclass
class Answer:
    """When the request was sent and when each piece of text came, on one clock in seconds; tokens as the server counted them."""

    sent_s: float
    times_s: list[float]
    tokens: int

    @property
    def ttft_s(self) -> float:
        """Time to the first text."""
        return self.times_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Times between pieces of text."""
        return [later - earlier for earlier, later in itertools.pairwise(self.times_s)]

    @property
    def tokens_per_s(self) -> float | None:
        """How fast the tokens after the first came; None for a single piece."""
        took = self.times_s[-1] - self.times_s[0]
        return (self.tokens - 1) / took if took > 0 else None


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


_DECODER = msgspec.json.Decoder(_Event)


class _Stream:
    """Collects an answer from the bytes of its events."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.tokens: int | None = None
        self._rest = b""

    def feed(self, data: bytes, now_s: float) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            field, _, value = line.partition(b":")
            if field == b"data" and value.strip() not in (b"", b"[DONE]"):
                self._event(_DECODER.decode(value), now_s)

    def _event(self, event: _Event, now_s: float) -> None:
        if event.error is not None:
            raise AnswerError(f"the stream ends with an error: {bytes(event.error).decode()}")
        if event.usage is not None:
            self.tokens = event.usage.completion_tokens
        # An event without text that only says why the answer ended is no token.
        if any(choice.text or choice.finish_reason is None for choice in event.choices or ()):
            self.times_s.append(now_s)


def body(question: Question, address: Address) -> bytes:
    """The request's body."""
    fields = {"model": address.model, "max_tokens": question.tokens, "temperature": 0, "stream": True}
    if address.plain:
        return msgspec.json.encode({**fields, "prompt": question.text})
    more = {"prompt": question.prompt, "ignore_eos": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode({**fields, **more})


async def ask(question: Question, address: Address) -> Answer:
    """Send it on a connection of its own and read the answer; raises AnswerError."""
    content = body(question, address)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", address.port)
    except OSError as error:
        raise AnswerError(f"no connection: {error}") from error
    try:
        sent_s = time.perf_counter()
        stream = await _exchange(reader, writer, content)
    except (OSError, h11.RemoteProtocolError, msgspec.MsgspecError) as error:
        raise AnswerError(f"{type(error).__name__}: {error}") from error
    finally:
        writer.close()
    if stream.tokens != question.tokens or not stream.times_s:
        raise AnswerError(f"{question.tokens} tokens were asked for; usage says {stream.tokens}")
    return Answer(sent_s, stream.times_s, question.tokens)


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, content: bytes) -> _Stream:
    protocol = h11.Connection(our_role=h11.CLIENT)
    headers = [
        ("host", "127.0.0.1"),
        ("content-type", "application/json"),
        ("content-length", str(len(content))),
        ("connection", "close"),
    ]
    for part in (h11.Request(method="POST", target=PATH, headers=headers), h11.Data(content), h11.EndOfMessage()):
        writer.write(protocol.send(part) or b"")
    await writer.drain()
    stream, status, refusal, now_s = _Stream(), 0, b"", 0.0
    while True:
        event = protocol.next_event()
        if event is h11.NEED_DATA:
            protocol.receive_data(await reader.read(65536))
            now_s = time.perf_counter()
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data) and status == 200:
            stream.feed(bytes(event.data), now_s)
        elif isinstance(event, h11.Data):
            refusal += event.data
        elif isinstance(event, h11.EndOfMessage):
            if status != 200:
                raise AnswerError(f"status {status}: {refusal[:500].decode(errors='replace')}")
            return stream
