"""POST /generate_stream."""

from __future__ import annotations

import json

import pytest

from tests.dialects.mindie.conftest import LINE, PROMPT, chunks, golden


def ask(**parameters):
    return {"inputs": PROMPT, "parameters": {"max_new_tokens": 7, **parameters}}


@pytest.mark.live
def test_one_frame_a_chunk(mindie):
    frames = chunks(mindie, "/generate_stream", ask())
    parsed = [json.loads(frame.removeprefix(b"data: ")) for frame in frames]
    assert all(frame.startswith(b"data: {") and frame.endswith(b"}\n\n") for frame in frames)
    assert "".join(frame["token"]["text"] for frame in parsed) == LINE
    assert sum(len(frame["token"]["id"]) for frame in parsed) == 7
    assert [frame["generated_text"] for frame in parsed] == [None] * (len(parsed) - 1) + [LINE]


@pytest.mark.live
def test_golden_last_frame(mindie):
    golden(
        chunks(mindie, "/generate_stream", ask(details=True, max_new_tokens=1, seed=5))[-1],
        'data: {"token":{"id":[<n>],"text":" The","logprob":null,"special":null},"generated_text":" The",'
        '"details":{"prompt_tokens":12,"finish_reason":"length","generated_tokens":1,"seed":5}}\n\n',
    )


@pytest.mark.live
def test_headers(mindie):
    answer = mindie.post("/generate_stream", ask(max_new_tokens=1))
    assert answer.headers["content-type"] == "text/event-stream"
    assert len(answer.headers["RequestUUID"]) == 32


def test_refusals_are_ordinary_answers(mindie):
    error = "The decoder_input_details must not be true when stream is true."
    mindie.refused("/generate_stream", ask(decoder_input_details=True), error)
    mindie.refused("/generate_stream", b"{", "Failed to parse request context to json")
    too_long = {"inputs": "a " * 5000}
    assert mindie.post("/generate_stream", too_long).status_code == 424
