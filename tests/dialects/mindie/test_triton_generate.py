"""POST /v2/models/{m}[/versions/{v}]/generate and .../generate_stream."""

from __future__ import annotations

import json

import pytest

from tests.dialects.mindie.conftest import LINE, PROMPT, chunks, golden, several_chunks

PATH = "/v2/models/demo/generate"


def ask(**parameters):
    return {"id": "a123", "text_input": PROMPT, "parameters": {"max_new_tokens": 7, **parameters}}


@pytest.mark.live
def test_golden(mindie):
    expected = f'{{"id":"a123","model_name":"demo","model_version":null,"text_output":"{LINE}"}}'
    assert mindie.post(PATH, ask()).text == expected
    assert mindie.post("/v2/models/demo/versions/1/generate", ask()).text == expected


@pytest.mark.live
def test_golden_details(mindie):
    golden(
        mindie.post(PATH, ask(details=True, max_new_tokens=1)).content,
        '{"id":"a123","model_name":"demo","model_version":null,"text_output":" The","details":{"finish_reason":"length",'
        '"generated_tokens":1,"first_token_cost":null,"decode_cost":null,"batch_size":[<n>],"queue_wait_time":[<n>]}}',
    )


@pytest.mark.live
def test_golden_stream(mindie):
    frames = several_chunks(mindie, f"{PATH}_stream", {**ask(details=True), "details": True})
    golden(
        frames[0],
        'data:{"id":"a123","model_name":"demo","model_version":null,"text_output":" The<text>","details":'
        '{"generated_tokens":<n>,"first_token_cost":null,"decode_cost":null,"batch_size":<n>,"queue_wait_time":<n>},'
        '"prefill_time":<n>,"decode_time":null}\n\n',
    )
    last = json.loads(frames[-1].removeprefix(b"data:"))
    assert last["details"]["finish_reason"] == "length"
    assert last["details"]["generated_tokens"] == 7
    assert last["prefill_time"] is None
    assert "".join(json.loads(f.removeprefix(b"data:"))["text_output"] for f in frames) == LINE


@pytest.mark.live
def test_perf_stat_has_a_pair_for_each_token(mindie):
    answer = mindie.post(PATH, ask(details=True, perf_stat=True))
    details = answer.json()["details"]
    costs = ["first_token_cost", "decode_cost", "perf_stat", "batch_size", "queue_wait_time"]
    assert list(details) == ["finish_reason", "generated_tokens", *costs]
    pairs = details["perf_stat"]
    assert pairs[0][1] > 0
    asked = {"inputs": PROMPT, "parameters": {"max_new_tokens": 7, "details": True}}
    assert [token for token, _ in pairs] == mindie.post("/infer", asked).json()["details"]["generated_token_ids"]
    frames = [json.loads(f[5:])["details"] for f in chunks(mindie, f"{PATH}_stream", ask(details=True, perf_stat=True))]
    assert [len(details["perf_stat"]) for details in frames] == [details["generated_tokens"] for details in frames]
    assert [token for token, _ in frames[-1]["perf_stat"]] == [token for token, _ in pairs]
    assert "perf_stat" not in mindie.post(PATH, ask(details=True)).json()["details"]


@pytest.mark.live
def test_four_keys_without_details(mindie):
    frames = chunks(mindie, f"{PATH}_stream", ask())
    assert all(list(json.loads(f[5:])) == ["id", "model_name", "model_version", "text_output"] for f in frames)


@pytest.mark.parametrize("path", [PATH, f"{PATH}_stream"])
@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({}, "The text_input not found"),
        ({"text_input": []}, "Parameter text_input arr is empty"),
        ({"text_input": "a", "parameters": 5}, "parameters must be object type."),
        ({"text_input": "a", "parameters": {"temperature": 0}},
         "Parameter temperature must be in (0.0,3.40282e+38], got 0."),
        ({"text_input": "a", "parameters": {"priority": 0}}, "Parameter priority must be in [1,5], got 0."),
        ({"text_input": "a", "id": ""}, "The id can contain only digits, letters, underscores(_), hyphens(-) and no more than 256 words in length."),
    ],
)  # fmt: skip
def test_refused(mindie, path, body, error):
    mindie.refused(path, body, error)


def test_unknown_model(mindie):
    mindie.refused("/v2/models/x/generate", {}, "Model x not found.", 404)
