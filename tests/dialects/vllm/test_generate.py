"""POST /generate with `prompt`."""

from __future__ import annotations

import itertools
import json

import pytest

PROMPT = "Question: What is the capital of Spain?\nAnswer:"
LINE = " The capital of Spain is Madrid."


def ask(**fields):
    return {"prompt": PROMPT, "max_tokens": 7, "temperature": 0, **fields}


@pytest.mark.live
def test_whole(server):
    assert server.post("/generate", ask()).json() == {"text": [PROMPT + LINE]}


@pytest.mark.live
def test_stream_is_cumulative_with_the_prompt(server):
    parts = server.post("/generate", ask(stream=True)).content.split(b"\0")
    assert parts.pop() == b""
    texts = [json.loads(part)["text"][0] for part in parts]
    assert texts[-1] == PROMPT + LINE
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))


@pytest.mark.live
def test_several_sequences(server):
    texts = server.post("/generate", ask(n=3, temperature=1.0, seed=1)).json()["text"]
    assert len(texts) == 3
    assert all(text.startswith(PROMPT) for text in texts)


@pytest.mark.live
def test_16_tokens_by_default(server):
    body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True}
    shorter, expected = (server.post("/generate", {**body, "max_tokens": n}).json() for n in (15, 16))
    assert server.post("/generate", body).json() == expected != shorter


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"prompt": 5}, "prompt"), ({"prompt": ""}, "prompt"), ({"top_p": 0}, "top_p"), ({"max_tokens": 0}, "max_tokens"),
     ({"unknown": 1}, "unknown"), ({"use_beam_search": True}, "use_beam_search"), ({"n": 2}, "n")],
)  # fmt: skip
def test_refused(server, fields, param):
    answer = server.post("/generate", ask(**fields))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
