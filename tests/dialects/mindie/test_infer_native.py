"""POST /infer and /infer_token."""

from __future__ import annotations

import json

import pytest

from tests.dialects.mindie.conftest import LINE, PROMPT, golden, several_chunks

PATHS = ["/infer", "/infer_token"]


@pytest.mark.live
@pytest.mark.parametrize("path", PATHS)
def test_golden(mindie, path):
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 2, "details": True, "seed": 7}}
    golden(
        mindie.post(path, body).content,
        '{"generated_text":" The capital","details":{"finish_reason":"length","generated_tokens":2,'
        '"generated_token_ids":[<n>,<n>],"seed":7}}',
    )
    assert mindie.post(path, {"inputs": PROMPT, "parameters": {"max_new_tokens": 7}}).json() == {"generated_text": LINE}


@pytest.mark.live
@pytest.mark.parametrize("path", PATHS)
def test_golden_stream(mindie, path):
    ids = mindie.server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    body = {"input_id": ids, "stream": True, "parameters": {"max_new_tokens": 7, "details": True, "seed": 7}}
    frames = several_chunks(mindie, path, body)
    golden(frames[0], 'data: {"prefill_time":<n>,"decode_time":null,"token":{"id":<ids>,"text":" The<text>"}}\n\n')
    last = json.loads(frames[-1].removeprefix(b"data: "))
    assert list(last) == ["prefill_time", "decode_time", "generated_text", "details", "token"]
    assert last["generated_text"] == LINE
    assert last["token"]["text"] is None
    assert last["details"] == {"finish_reason": "length", "generated_tokens": 7, "seed": 7}


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({}, "Not found inputs."),
        ({"inputs": "a", "input_id": [1]}, "Input conflict."),
        ({"input_id": 5}, "Parameter input_id must be an array"),
        ({"input_id": ["a"]}, "Parameter input_id must be integer"),
        ({"input_id": []}, "Inputs token length must be in (0, 1048576], but got 0"),
        ({"input_id": [-1]}, "Data element in param input_id is invalid"),
        ({"inputs": []}, "Inputs arr is empty"),
        ({"inputs": "a", "stream": 1}, "stream must be boolean type."),
        ({"inputs": "a", "stream": 1, "parameters": {"details": 1}}, "details must be boolean type."),
        ({"inputs": "a", "parameters": {"priority": 6}}, "Parameter priority must be in [1,5], got 6."),
        ({"inputs": "a", "parameters": {"priority": 0}}, "Parameter priority must be in [1,5], got 0."),
        (
            {"inputs": "a", "parameters": {"timeout": 65536}},
            "Parameter timeout must be strictly positive and small than 65535 seconds, got 65536.",
        ),
        ({"inputs": "a", "parameters": {"top_p": 1}}, "Parameter top_p must be in (0.0,1.0], got 1."),
        (b"{", "Failed to parse request context to json"),
    ],
)
def test_refused(mindie, body, error):
    mindie.refused("/infer", body, error)


def test_ids_that_the_model_has_not(mindie):
    mindie.refused("/infer", {"input_id": [10**6]}, "Failed to enqueue inferRequest. Invalid Input Ids", 424)
