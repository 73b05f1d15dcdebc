"""POST /v1/tokenizer."""

from __future__ import annotations

import pytest


def test_golden(mindie):
    ids = mindie.server.post("/tokenize", {"prompt": "hello world"}).json()["tokens"]
    answer = mindie.post("/v1/tokenizer", {"inputs": "hello world"}).json()
    assert answer["token_number"] == len(ids)
    assert "".join(answer["tokens"]) == "hello world"
    assert list(answer) == ["token_number", "tokens"]


def test_characters_of_several_tokens_are_one_piece(mindie):
    answer = mindie.post("/v1/tokenizer", {"inputs": "日本", "do_decode": "ignored"}).json()
    assert answer["tokens"] == ["日", "本"]
    assert answer["token_number"] > 2


def test_without_decoding(mindie):
    assert mindie.post("/v1/tokenizer", {"inputs": "hello", "do_decode": False}).json()["tokens"] == []


@pytest.mark.parametrize("body", [{}, {"inputs": ""}, {"inputs": None}, {"inputs": 5}, {"inputs": ["a"]}])
def test_refused(mindie, body):
    mindie.refused("/v1/tokenizer", body, "Inputs in request body is invalid.")


def test_malformed(mindie):
    mindie.refused("/v1/tokenizer", b"{", "Req body converts to json fail.")
    error = "Failed to check the input text.Can't convert string to UTF-16."
    answer = mindie.post("/v1/tokenizer", b'{"inputs": "\\ud800"}')
    assert answer.status_code == 422
    assert answer.json()["error"] in (error, "Req body converts to json fail.")
