"""One engine: the same prompt, seed and parameters give the same text through every dialect, streamed or not."""

from __future__ import annotations

import json

import pytest

from tests import calls
from tests.live import events

pytestmark = pytest.mark.live

PROMPT = "Once upon a time there was"
TEMPERATURE, TOKENS = 0.7, 24
PLAIN = {"temperature": TEMPERATURE, "ignore_eos": True}
TGI = {"temperature": TEMPERATURE, "max_new_tokens": TOKENS}


def front(server, path, body):
    return server.post(path, body)


def mindie(server, path, body):
    return calls.post(server.mindie_url + path, json=body, timeout=60)


def nul_frames(answer):
    return [json.loads(part) for part in answer.content.split(b"\0")[:-1]]


def data_frames(answer):
    return [
        json.loads(part[5:]) for part in answer.text.split("\n\n") if part.startswith("data:") and "[DONE]" not in part
    ]


def output0(answer, server):
    return server.post("/detokenize", {"tokens": answer.json()["outputs"][0]["data"]}).json()["prompt"]


CASES = {
    "openai": lambda s: front(s, "/v1/completions", {"prompt": PROMPT, "max_tokens": TOKENS, **PLAIN}).json()["choices"][0]["text"],
    "openai stream": lambda s: "".join(
        e["choices"][0]["text"] for e in events(front(s, "/v1/completions", {"prompt": PROMPT, "max_tokens": TOKENS, "stream": True, **PLAIN})) if e != "[DONE]"
    ),
    "vllm": lambda s: front(s, "/generate", {"prompt": PROMPT, "max_tokens": TOKENS, **PLAIN}).json()["text"][0].removeprefix(PROMPT),
    "vllm stream": lambda s: nul_frames(front(s, "/generate", {"prompt": PROMPT, "max_tokens": TOKENS, "stream": True, **PLAIN}))[-1]["text"][0].removeprefix(PROMPT),
    "tgi": lambda s: front(s, "/generate", {"inputs": PROMPT, "parameters": TGI}).json()["generated_text"],
    "tgi stream": lambda s: events(front(s, "/generate_stream", {"inputs": PROMPT, "parameters": TGI}))[-1]["generated_text"],
    "triton infer": lambda s: front(s, "/v2/models/demo/infer", {
        "inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [PROMPT]}],
        "parameters": {"max_tokens": TOKENS, **PLAIN}}).json()["outputs"][0]["data"][0],
    "triton generate": lambda s: front(s, "/v2/models/demo/generate", {"text_input": PROMPT, "max_tokens": TOKENS, **PLAIN}).json()["text_output"],
    "triton stream": lambda s: "".join(e["text_output"] for e in events(
        front(s, "/v2/models/demo/generate_stream", {"text_input": PROMPT, "max_tokens": TOKENS, **PLAIN}))),
    "mindie openai": lambda s: mindie(s, "/v1/completions", {"model": "demo", "prompt": PROMPT, "max_tokens": TOKENS, **PLAIN}).json()["choices"][0]["text"],
    "mindie openai stream": lambda s: "".join(f["choices"][0]["text"] for f in data_frames(
        mindie(s, "/v1/completions", {"model": "demo", "prompt": PROMPT, "max_tokens": TOKENS, "stream": True, **PLAIN}))),
    "mindie tgi": lambda s: mindie(s, "/generate", {"inputs": PROMPT, "parameters": TGI}).json()["generated_text"],
    "mindie tgi stream": lambda s: data_frames(mindie(s, "/generate_stream", {"inputs": PROMPT, "parameters": TGI}))[-1]["generated_text"],
    "mindie vllm": lambda s: mindie(s, "/generate", {"prompt": PROMPT, "max_tokens": TOKENS, **PLAIN}).json()["text"][0].removeprefix(PROMPT + " "),
    "mindie vllm stream": lambda s: "".join(f["text"][0] for f in nul_frames(mindie(s, "/generate", {"prompt": PROMPT, "max_tokens": TOKENS, "stream": True, **PLAIN}))),
    "mindie native": lambda s: mindie(s, "/infer", {"inputs": PROMPT, "parameters": TGI}).json()["generated_text"],
    "mindie native stream": lambda s: data_frames(mindie(s, "/infer_token", {"inputs": PROMPT, "stream": True, "parameters": TGI}))[-1]["generated_text"],
    "mindie triton": lambda s: mindie(s, "/v2/models/demo/generate", {"text_input": PROMPT, "parameters": TGI}).json()["text_output"],
    "mindie triton stream": lambda s: "".join(f["text_output"] for f in data_frames(
        mindie(s, "/v2/models/demo/generate_stream", {"text_input": PROMPT, "parameters": TGI}))),
    "mindie triton tokens": lambda s: output0(mindie(s, "/v2/models/demo/infer", {
        "inputs": [{"name": "i", "shape": [1, len(ids(s))], "datatype": "UINT32", "data": ids(s)}], "outputs": [{"name": "o"}],
        "parameters": TGI}), s),
}  # fmt: skip


@pytest.fixture(autouse=True)
def seed(server):
    """One whose text does not end before its limit, which TGI's clients cannot ask for."""
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": TEMPERATURE}
    for seed in range(PLAIN.get("seed", 0), 100):  # the one of the test before, if there was one
        if server.post("/v1/completions", {**body, "seed": seed}).json()["choices"][0]["finish_reason"] == "length":
            PLAIN["seed"] = TGI["seed"] = seed
            return seed
    pytest.fail("every text ends early")


def ids(server):
    return server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]


@pytest.mark.parametrize("name", CASES)
def test_the_same_text(server, name):
    expected = CASES["openai"](server)
    assert len(expected) > 20
    assert CASES[name](server) == expected


def test_another_seed_gives_another_text(server, seed):
    body = {"prompt": PROMPT, "max_tokens": TOKENS, **PLAIN, "seed": seed + 1}
    assert server.post("/v1/completions", body).json()["choices"][0]["text"] != CASES["openai"](server)
