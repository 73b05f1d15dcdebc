"""What grows with a request is not done on the event loop's own thread."""

from __future__ import annotations

import asyncio
import gc
import json
import threading

import msgspec
import pytest
from tokenizers import Tokenizer

from inference.chat.chat_template import ChatTemplate
from inference.errors import MalformedBody
from inference.generation.requests import ChatPrompt
from inference.http.exchange import Exchange, parse_json
from inference.http.offload import INLINE_BYTES, SLICE, encoded, in_thread
from inference.workers.tokenizer import ModelTokenizer
from tests.conftest import DEMO


class Recorder:
    """Stands for a chat template and tells in which thread it was rendered."""

    thread = ""

    def render(self, _) -> str:
        self.thread = threading.current_thread().name
        return "text"


def exchange_of(body: bytes) -> Exchange:
    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        raise AssertionError(message)

    return Exchange({"method": "POST", "path": "/", "headers": []}, receive, send)


@pytest.mark.parametrize(("size", "elsewhere"), [(10, False), (INLINE_BYTES + 1, True)])
def test_large_bodies_are_worked_on_in_a_thread(size, elsewhere):
    async def run() -> str:
        exchange = exchange_of(json.dumps({"a": "x" * size}).encode())
        assert len((await exchange.json())["a"]) == size
        return await exchange.work(lambda: threading.current_thread().name)

    assert asyncio.run(run()).startswith("offload") is elsewhere


@pytest.mark.parametrize(
    ("messages", "arguments", "elsewhere"),
    [
        ([{"role": "user", "content": "a"}], {}, False),
        ([{"role": "user", "content": "a"}] * 1000, {}, True),
        ([{"role": "user", "content": "a" * 100_000}], {}, True),
        ([{"role": "user", "content": "a", "more": [1]}], {}, True),
        ([{"role": "user", "content": "a"}], {"tools": [{}]}, True),
    ],
)
def test_long_conversations_are_rendered_in_a_thread(messages, arguments, elsewhere):
    recorder = Recorder()
    fast, template = Tokenizer.from_file(str(DEMO / "tokenizer.json")), ChatTemplate(recorder, {})
    tokenizer = ModelTokenizer(fast, frozenset(), template, {})
    ids = asyncio.run(tokenizer.encode(ChatPrompt(messages, template_arguments=arguments)))
    assert tokenizer.decode(ids) == "text"
    assert recorder.thread.startswith("offload") is elsewhere


def test_what_fails_in_a_thread_fails_here():
    def fail() -> None:
        raise MalformedBody("no")

    with pytest.raises(MalformedBody, match="no"):
        asyncio.run(in_thread(fail))


@pytest.mark.parametrize("count", [0, 1, SLICE - 1, SLICE, SLICE + 1, 3 * SLICE])
def test_lists_in_slices_are_lists(count):
    values = [{"n": n, "texts": [str(n)]} for n in range(count)]
    assert msgspec.json.decode(msgspec.json.encode({"a": encoded(values), "b": 1})) == {"a": values, "b": 1}


def test_garbage_is_collected_again_whatever_a_body_was():
    for body in (b'{"a":[' + b"[]," * 200_000 + b"[]]}", b'{"a":' + b"[" * 200_000, b"[" + b"{}," * 150_000 + b"{}]"):
        with pytest.raises(MalformedBody):
            parse_json(body)
        assert gc.isenabled()
