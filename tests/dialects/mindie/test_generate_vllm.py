"""POST /generate with `prompt`."""

from __future__ import annotations

import json

import pytest

from tests.dialects.mindie.conftest import LINE, PROMPT, chunks


@pytest.mark.live
def test_golden(mindie):
    answer = mindie.post("/generate", {"prompt": PROMPT, "max_tokens": 7, "temperature": 0})
    assert answer.content == json.dumps({"text": [f"{PROMPT} {LINE}"]}, separators=(",", ":")).encode()


@pytest.mark.live
def test_prompt_goes_before_inputs(mindie):
    answer = mindie.post("/generate", {"prompt": PROMPT, "inputs": "x", "max_tokens": 1})
    assert answer.json() == {"text": [f"{PROMPT}  The"]}


@pytest.mark.live
def test_stream_has_no_prompt_and_ends_every_object_with_nul(mindie):
    frames = chunks(mindie, "/generate", {"prompt": PROMPT, "max_tokens": 7, "stream": True})
    assert all(frame.startswith(b'{"text":["') and frame.endswith(b'"]}\0') for frame in frames)
    assert "".join(json.loads(frame[:-1])["text"][0] for frame in frames) == LINE


@pytest.mark.live
def test_several_sequences(mindie):
    body = {"prompt": PROMPT, "max_tokens": 7, "temperature": 1.0, "n": 2, "seed": 1}
    assert len(mindie.post("/generate", body).json()["text"]) == 2
    assert len(mindie.post("/generate", {**body, "best_of": 3}).json()["text"]) == 3
    frames = chunks(mindie, "/generate", {**body, "stream": True})
    assert all(len(json.loads(frame[:-1])["text"]) == 2 for frame in frames)


@pytest.mark.live
def test_adapters_by_name(mindie):
    body = {"prompt": "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
            "max_tokens": 30}  # fmt: skip
    base = mindie.post("/generate", body).json()
    assert mindie.post("/generate", {**body, "model": "json"}).json() != base
    for name in ("None", "demo", "unknown", None):
        assert mindie.post("/generate", {**body, "model": name}).json() == base


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"temperature": -0.1}, "Parameter temperature must be in (0.0,3.40282e+38], got -0.1."),
        ({"top_k": 0}, "Parameter top_k must be in -1 || (0,2147483647], got 0"),
        ({"top_p": 0}, "Parameter top_p must be in (0.0,1.0], got 0."),
        ({"presence_penalty": 2.1}, "Parameter presence_penalty not in [-2.0, 2.0], but got 2.1."),
        ({"frequency_penalty": -2.1}, "Parameter frequency_penalty should be in [-2.0, 2.0], got -2.1."),
        ({"stop_token_ids": 5}, "Parameter stop_token_ids not array"),
        ({"stop_token_ids": ["x"]}, "Parameter stop_token_ids not list[int]"),
        (
            {"stop_token_ids": [*range(1025), 0]},
            "Parameter stop_token_ids must have at most 1024 different ids, but got 1025",
        ),
        ({"best_of": 129}, "Parameter [best_of] should be in [1, 128], got 129."),
        ({"n": 0}, "Parameter [n] should be in [1, 8192], got 0. "),
        ({"n": 8193}, "Parameter [n] should be in [1, 8192], got 8193. "),
        ({"n": 2}, "Best_of/N can not greater than 1 when temperature is 0 or not set, but best_of is None, n is 2."),
        (
            {"best_of": 2},
            "Best_of/N can not greater than 1 when temperature is 0 or not set, but best_of is 2, n is None.",
        ),
        (
            {"n": 3, "best_of": 2, "temperature": 1},
            "best_of should greater than or equal to n, but best_of is 2, n is 3.",
        ),
        (
            {"n": 65, "temperature": 1},
            "The n parameter (65) exceeds 'max_batch_size' (64). Please reduce n or increase 'max_batch_size' in "
            "config.json of mindie-service. ",
        ),
        ({"max_tokens": 0}, "Parameter max_tokens must be (0,2147483647], got 0"),
        ({"model": ""}, "Input validation error: length of `model` must be in [1, 256], but got 0"),
        ({"stream": 1}, "stream must be boolean type."),
        ({"ignore_eos": 1, "temperature": -1}, "ignore_eos must be boolean type."),
    ],
)
def test_refused(mindie, fields, error):
    mindie.refused("/generate", {"prompt": PROMPT, **fields}, error)


@pytest.mark.live
@pytest.mark.parametrize("fields", [{"top_k": -1}, {"top_p": 1}, {"temperature": 0}, {"stop_token_ids": [10**9, -5]},
                                    {"presence_penalty": 2}, {"use_beam_search": True}, {"logprobs": 1}])  # fmt: skip
def test_accepted(mindie, fields):
    assert mindie.post("/generate", {"prompt": PROMPT, "max_tokens": 1, **fields}).status_code == 200


def test_prompt_of_the_wrong_type(mindie):
    mindie.refused("/generate", {"prompt": 5}, "The type of prompt is abnormal")
    mindie.refused("/generate", {"prompt": []}, "Prompt arr is empty")
