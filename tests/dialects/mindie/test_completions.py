"""POST /v1/completions."""

from __future__ import annotations

import json

import pytest

from tests.dialects.mindie.conftest import LINE, PROMPT, chunks, golden

PATH = "/v1/completions"


def ask(**fields):
    return {"model": "demo", "prompt": PROMPT, "max_tokens": 7, **fields}


@pytest.mark.live
def test_golden(mindie):
    golden(
        mindie.post(PATH, ask()).content,
        '{"id":"<id>","object":"text_completion","created":<n>,"model":"demo","choices":[{"index":0,"text":"'
        + LINE
        + '","logprobs":null,"stop_reason":null,"finish_reason":"length"}],"usage":{"prompt_tokens":12,'
        '"prompt_tokens_details":{"cached_tokens":<n>},"completion_tokens":7,"total_tokens":19}}',
    )


@pytest.mark.live
def test_golden_stream_has_usage_behind_the_choices(mindie):
    frames = chunks(mindie, PATH, ask(stream=True, max_tokens=1))
    golden(
        frames[0],
        'data: {"id":"<id>","object":"text_completion","created":<n>,"model":"demo","choices":[{"index":0,'
        '"text":" The","logprobs":null,"stop_reason":null,"finish_reason":"length"}],"usage":{"prompt_tokens":12,'
        '"prompt_tokens_details":{"cached_tokens":<n>},"completion_tokens":1,"total_tokens":13}}\n\n',
    )
    assert frames[1:] == [b"data: [DONE]\n\n"]


@pytest.mark.live
def test_token_ids(mindie):
    ids = mindie.server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    assert mindie.post(PATH, ask(prompt=ids)).json()["choices"][0]["text"] == LINE


@pytest.mark.live
def test_logprobs_count_bytes_across_choices(mindie):
    body = ask(logprobs=2, n=2, temperature=1.0, seed=3, max_tokens=2)
    first, second = (c["logprobs"] for c in mindie.post(PATH, body).json()["choices"])
    assert first["text_offset"][0] == 0
    assert second["text_offset"][0] == sum(len(t.encode()) for t in first["tokens"])
    for lists in (first, second):
        assert all(next(iter(top)) == token for token, top in zip(lists["tokens"], lists["top_logprobs"], strict=True))
    streamed = chunks(mindie, PATH, ask(logprobs=1, max_tokens=4, stream=True))[:-1]
    tokens = [t for f in streamed for t in json.loads(f[6:])["choices"][0]["logprobs"]["tokens"]]
    assert tokens == mindie.post(PATH, ask(logprobs=1, max_tokens=4)).json()["choices"][0]["logprobs"]["tokens"]


@pytest.mark.live
def test_n_of_best_of(mindie):
    body = ask(n=2, best_of=4, temperature=1.0, seed=1, max_tokens=3)
    answer = mindie.post(PATH, body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] <= 6


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model": "x"}, "Not found given model, please check modelName in config file."),
        ({"prompt": None}, "Contains not prompt or prompt null"),
        ({"prompt": {}}, "The type of prompt is abnormal,prompt must be str or integer list."),
        ({"prompt": ["a"]}, "All elements of the prompt array must be integers."),
        ({"prompt": []}, "Prompt array cannot be empty."),
        ({"logprobs": 6}, "logprobs should be in range [0, 5], got 6."),
        ({"logprobs": -1}, "logprobs must be unsigned type."),
    ],
)
def test_refused(mindie, fields, error):
    mindie.refused(PATH, ask(**fields), error)


def test_ids_that_the_model_has_not(mindie):
    mindie.refused(PATH, ask(prompt=[10**6]), "Failed to enqueue inferRequest. Invalid Input Ids", 424)
    assert mindie.post(PATH, ask(prompt=[-1])).status_code == 424


def test_the_whole_rest_without_max_tokens(mindie):
    body = {"model": "demo", "prompt": PROMPT, "ignore_eos": True}
    usage = mindie.post(PATH, body).json()["usage"]
    assert usage["total_tokens"] == 2048
