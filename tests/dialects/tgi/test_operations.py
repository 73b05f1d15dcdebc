"""POST /chat_tokenize, /invocations and /vertex, watermarks, and the lengths of a truncated prompt."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from tests.conftest import DEMO
from tests.live import events

INPUTS = "Question: What is the capital of Spain?\nAnswer:"
MESSAGES = [{"role": "user", "content": "Hé 1"}]


def test_chat_tokenize(server):
    answer = server.post("/chat_tokenize", {"model": "tgi", "messages": MESSAGES}).json()
    raw = answer["templated_text"].encode()
    assert "Hé 1" in answer["templated_text"]
    assert all(raw[t["start"] : t["stop"]].decode() == t["text"] for t in answer["tokenize_response"])
    ids = server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    assert [t["id"] for t in answer["tokenize_response"]] == ids


@pytest.mark.parametrize("body", [{}, {"messages": 5}, {"messages": []}, {"messages": [{"content": "a"}]}])
def test_chat_tokenize_refuses(server, body):
    answer = server.post("/chat_tokenize", body)
    assert answer.status_code == 422
    assert set(answer.json()) == {"error", "error_type"}


def test_invocations(server):
    body = {"inputs": INPUTS, "parameters": {"max_new_tokens": 4, "return_full_text": False}}
    assert server.post("/invocations", body).json() == server.post("/", body).json()
    frames = events(server.post("/invocations", {**body, "stream": True}))
    assert frames[-1]["generated_text"] == server.post("/", body).json()[0]["generated_text"]
    chat = {"messages": MESSAGES, "temperature": 0, "max_tokens": 5}
    whole = server.post("/v1/chat/completions", chat).json()["choices"]
    assert server.post("/invocations", chat).json()["choices"] == whole
    prompt = {"prompt": INPUTS, "temperature": 0, "max_tokens": 5}
    assert (
        server.post("/invocations", prompt).json()["choices"]
        == server.post("/v1/completions", prompt).json()["choices"]
    )
    assert server.post("/invocations", {"input": "a"}).json()["error"]["param"] == "model"
    assert server.post("/invocations", {}).status_code == 422


@pytest.mark.live
def test_vertex(server):
    instance = {"inputs": INPUTS, "parameters": {"max_new_tokens": 5, "seed": 1}}
    body = {"instances": [instance, instance, {"messages": MESSAGES, "max_tokens": 3}]}
    first, second, third = server.post("/vertex", body).json()["predictions"]
    assert first == second
    assert isinstance(third, str)
    for bad in ({}, {"instances": []}, {"instances": [5]}, {"instances": [{}]}, {"instances": [{"messages": 5}]}):
        assert server.post("/vertex", bad).status_code == 422, bad


@pytest.mark.live
def test_watermarks_prefer_half_of_the_vocabulary(server):
    """More than half of a marked text's tokens are preferred behind the one before; of an unmarked text about half."""
    from engine.sampling.watermark import preferred  # which imports torch

    vocab_size = json.loads((DEMO / "config.json").read_text())["vocab_size"]

    def share(watermark):
        hits = places = 0
        for seed in range(8):
            parameters = {"max_new_tokens": 150, "do_sample": True, "temperature": 3.0, "seed": seed, "details": True,
                          "watermark": watermark}  # fmt: skip
            answer = server.post("/generate", {"inputs": "Once", "parameters": parameters}).json()
            ids = [token["id"] for token in answer["details"]["tokens"]]
            hits += sum(b in preferred(a, vocab_size).tolist() for a, b in pairwise(ids))
            places += len(ids) - 1
        return hits / places

    marked, unmarked = share(True), share(False)
    assert marked > 0.58
    assert abs(unmarked - 0.5) < 0.07
