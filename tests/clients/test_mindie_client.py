"""MindIE's dialects through a client that parses as MindIE's own does."""

from __future__ import annotations

import numpy as np
import pytest

from tests.clients.mindie_client import MindieClient, MindieError

pytestmark = pytest.mark.smoke

PROMPT = "Question: What is the capital of Spain?\nAnswer:"
LINE = " The capital of Spain is Madrid."


@pytest.fixture
def client(server):
    return MindieClient(server.mindie_url, server.management_url)


def test_questions(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("demo")
    assert client.is_model_ready("demo", "1")
    assert not client.is_model_ready("none")
    assert client.get_slot_count("demo")["total_slots"] > 0
    assert client.get_model_metadata("demo")["inputs"][0]["datatype"] == "UINT32"
    assert client.get_model_config("demo")["model_name"] == "demo"


def test_tensors_and_texts(client):
    ids = client.infer("demo", np.array([[364, 367, 259]], dtype=np.uint32), "output7", max_new_tokens=4)
    assert ids.shape == (1, 4)
    assert client.generate("demo", PROMPT, max_new_tokens=7) == LINE
    frames = list(client.generate_stream("demo", PROMPT, max_new_tokens=7))
    assert "".join(frame["text_output"] for frame in frames) == LINE
    with pytest.raises(MindieError, match="top_p"):
        client.generate("demo", PROMPT, top_p=2)


def test_cancel(client):
    frames = client.generate_stream(
        "demo", "Once", "stopme", max_new_tokens=2000, do_sample=True, temperature=5.0, seed=1
    )
    next(frames)
    assert client.cancel("demo", "stopme")
    last = list(frames)[-1]
    assert last["details"]["finish_reason"] == "stop_sequence"
    with pytest.raises(MindieError, match="RequestId is stopme not found"):
        client.cancel("demo", "stopme")


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/generate_stream", {"inputs": PROMPT, "parameters": {"max_new_tokens": 7}}, lambda f: f["token"]["text"]),
        ("/", {"inputs": PROMPT, "stream": True, "parameters": {"max_new_tokens": 7}}, lambda f: f["token"]["text"]),
        ("/generate", {"prompt": PROMPT, "max_tokens": 7, "stream": True}, lambda f: f["text"][0]),
        ("/v1/completions", {"model": "demo", "prompt": PROMPT, "max_tokens": 7, "stream": True},
         lambda f: f["choices"][0]["text"]),
    ],
)  # fmt: skip
def test_streams(client, path, body, text):
    assert "".join(text(frame) for frame in client.stream(path, body)) == LINE


def test_native_stream_ends_with_a_token_without_text(client):
    body = {"inputs": PROMPT, "stream": True, "parameters": {"max_new_tokens": 7}}
    frames = list(client.stream("/infer_token", body))
    assert [frame["token"]["text"] is None for frame in frames] == [False] * (len(frames) - 1) + [True]
    assert frames[-1]["generated_text"] == LINE


def test_chat_stream(client):
    body = {"model": "demo", "messages": [{"role": "user", "content": "What is the capital of Spain?"}], "stream": True}
    frames = list(client.stream("/v1/chat/completions", body))
    assert "".join(frame["choices"][0]["delta"]["content"] for frame in frames) == LINE.strip()
    assert "usage" in frames[-1]
