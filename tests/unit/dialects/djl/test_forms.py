"""Inference with bodies that are forms or plain text."""

from __future__ import annotations

import json
import threading
from urllib.parse import parse_qsl

import pytest

from inference.http.offload import INLINE_BYTES
from tests.unit.scripts import ids

MESSAGES = [{"role": "user", "content": "Hello"}]


def multipart(*parts, end=True):
    head = "".join(f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in parts)
    return (head + ("--x--\r\n" if end else "")).encode()


@pytest.mark.parametrize(
    ("body", "kind", "prompt"),
    [
        (multipart(("data", "Hello")), "multipart/form-data; boundary=x", "Hello"),
        (
            multipart(("model_name", "demo"), ("data", '{"inputs": "Hello"}')),
            "multipart/form-data; boundary=x",
            "Hello",
        ),
        (
            multipart(("inputs", "Hello"), ("parameters", '{"max_new_tokens": 3}')),
            "multipart/form-data; boundary=x",
            "Hello",
        ),
        (b"inputs=Hello%20you&model_name=demo", "application/x-www-form-urlencoded", "Hello you"),
        (b'{"inputs": "Hello"}', "application/x-www-form-urlencoded", "Hello"),
    ],
)
async def test_forms(djl, body, kind, prompt):
    answer = await djl.post("/invocations", body, content_type=kind)
    assert answer.status == 200, answer.text
    assert djl.worker.submits[0].prompt_token_ids[-len(ids(prompt)) :] == ids(prompt)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (multipart(("data", "Hello"), end=False), "multipart/form-data; boundary=x"),
        (multipart(("data", "a"), ("data", "b")), "multipart/form-data; boundary=x"),
        (multipart(("other", "a")), "multipart/form-data; boundary=x"),
        (multipart(*((f"f{i}", "a") for i in range(99))), "multipart/form-data; boundary=x"),
        (multipart(("d" * 9000, "a")), "multipart/form-data; boundary=x"),
        (
            b'--x\r\nContent-Disposition: form-data; name="data"\r\n\r\n\xff\r\n--x--\r\n',
            "multipart/form-data; boundary=x",
        ),
        (b"nothing", "multipart/form-data; boundary=x"),
        (b"nothing", "multipart/form-data"),
        (b"", "multipart/form-data; boundary="),
        (b"&".join(b"f%d=1" % i for i in range(99)), "application/x-www-form-urlencoded"),
        (b"inputs=%ff", "application/x-www-form-urlencoded"),
        (b"\xff", "text/plain"),
        (b"abc", "tensor/npz"),
        (multipart(("data", "{")), "multipart/form-data; boundary=x"),
    ],
)
async def test_forms_that_cannot_be(djl, body, kind):
    answer = await djl.post("/invocations", body, content_type=kind)
    assert (answer.status, answer.json()["code"]) == (424, 424)
    assert "Input Parsing failed" in answer.json()["error"]


async def test_a_long_form_is_decoded_in_a_thread(djl, monkeypatch):
    threads = []

    def decode(*args, **kwargs):
        threads.append(threading.current_thread())
        return parse_qsl(*args, **kwargs)

    monkeypatch.setattr("inference.http.forms.parse_qsl", decode)
    body = b"inputs=Hello&unknown=" + b"%20" * INLINE_BYTES
    answer = await djl.post("/invocations", body, content_type="application/x-www-form-urlencoded")
    assert answer.status == 200, answer.text
    assert threading.main_thread() not in threads


async def test_a_form_may_hold_a_conversation(djl):
    body = multipart(("data", json.dumps({"messages": MESSAGES})))
    answer = await djl.post("/invocations", body, content_type="multipart/form-data; boundary=x")
    assert (answer.status, answer.json()["object"]) == (200, "chat.completion")
