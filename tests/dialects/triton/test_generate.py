"""POST .../generate and .../generate_stream."""

from __future__ import annotations

import pytest

from tests.live import events

PROMPT = "Question: What is the capital of Spain?\nAnswer:"
LINE = " The capital of Spain is Madrid."
PATH = "/v2/models/demo/generate"


def ask(**fields):
    return {"text_input": PROMPT, "parameters": {"max_tokens": 7, "temperature": 0}, **fields}


@pytest.mark.live
def test_golden(server):
    expected = f'{{"model_name":"demo","model_version":"1","text_output":"{LINE}"}}'
    assert server.post(PATH, ask()).text == expected
    assert server.post(PATH, {"text_input": [PROMPT], "max_tokens": 7, "temperature": 0}).text == expected
    assert server.post(PATH, ask(id="x")).json()["id"] == "x"


@pytest.mark.live
def test_stream(server):
    answer = server.post(f"{PATH}_stream", ask(stream=True))
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    frames = events(answer)
    assert "".join(frame["text_output"] for frame in frames) == LINE
    assert "[DONE]" not in answer.text


@pytest.mark.live
def test_details(server):
    answer = server.post(PATH, ask(parameters={"max_tokens": 2, "temperature": 0, "details": True})).json()
    details = answer["details"]
    assert details["finish_reason"] == "length"
    assert "".join(token["text"] for token in details["logprobs"]) == answer["text_output"]
    assert {"id", "text", "logprob", "special"} == set(details["logprobs"][0])


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "text_input"),
        ({"text_input": 5}, "text_input"),
        ({"text_input": ""}, "empty"),
        (ask(parameters=5), "parameters"),
        (ask(parameters={"stop": {"a": 1}}), "invalid type"),
        (ask(stream=True), "exactly 1 response"),
        (ask(id=5), "id"),
        (b"{", "JSON"),
    ],
)
def test_refused(server, body, text):
    answer = server.post(PATH, body)
    assert answer.status_code == 400
    assert text in answer.json()["error"]


def test_refusals_of_a_stream_come_before_its_head(server):
    assert server.post(f"{PATH}_stream", ask(parameters={"top_p": 0})).status_code == 400
    assert server.post("/v2/models/none/generate_stream", ask()).status_code == 404
