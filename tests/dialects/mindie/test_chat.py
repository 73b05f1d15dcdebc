"""POST /v1/chat/completions."""

from __future__ import annotations

import json

import pytest

from tests.dialects.mindie.conftest import chunks, golden

ANSWER = "The capital of Spain is Madrid."
MESSAGES = [{"role": "user", "content": "What is the capital of Spain?"}]
PATH = "/v1/chat/completions"


def ask(**fields):
    return {"model": "demo", "messages": MESSAGES, **fields}


def test_golden(mindie):
    golden(
        mindie.post(PATH, ask()).content,
        '{"id":"<id>","object":"chat.completion","created":<n>,"model":"demo","choices":[{"index":0,"message":'
        '{"role":"assistant","content":"' + ANSWER + '","tool_calls":[]},"logprobs":null,"finish_reason":"stop"}],'
        '"usage":{"prompt_tokens":<n>,"prompt_tokens_details":{"cached_tokens":<n>},"completion_tokens":<n>,'
        '"total_tokens":<n>}}',
    )


def test_golden_stream(mindie):
    frames = chunks(mindie, PATH, ask(stream=True))
    head = 'data: {"id":"<id>","object":"chat.completion.chunk","created":<n>,"model":"demo",'
    golden(
        frames[0],
        head
        + '"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n',
    )
    last = json.loads(frames[-2].removeprefix(b"data: "))["choices"][0]["delta"]["content"]
    golden(
        frames[-2],
        head + '"usage":{"prompt_tokens":<n>,"prompt_tokens_details":{"cached_tokens":<n>},"completion_tokens":<n>,'
        '"total_tokens":<n>},"choices":[{"index":0,"delta":{"role":"assistant","content":"' + last + '"},'
        '"logprobs":null,"finish_reason":"stop"}]}\n\n',
    )
    assert frames[-1] == b"data: [DONE]\n\n"
    deltas = [json.loads(f.removeprefix(b"data: "))["choices"][0]["delta"] for f in frames[:-1]]
    assert all(delta["role"] == "assistant" for delta in deltas)
    assert "".join(delta["content"] for delta in deltas) == ANSWER


def test_the_callers_id(mindie):
    answer = mindie.post(PATH, ask(), headers={"req-id": "abc-1"})
    assert answer.json()["id"] == "abc-1"


def test_several_sequences(mindie):
    body = ask(n=2, temperature=1.0, seed=1, max_tokens=5)
    assert [c["index"] for c in mindie.post(PATH, body).json()["choices"]] == [0, 1]
    frames = [json.loads(f[6:]) for f in chunks(mindie, PATH, {**body, "stream": True})[:-1]]
    assert [f["choices"][0]["index"] for f in frames[:2]] == [0, 1]
    assert sum("usage" in frame for frame in frames) == 2


def test_logprobs(mindie):
    choice = mindie.post(PATH, ask(top_logprobs=2, max_tokens=3)).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 3
    assert all(len(entry["top_logprobs"]) == 2 and entry["bytes"] == list(entry["token"].encode()) for entry in content)
    frames = [json.loads(f[6:]) for f in chunks(mindie, PATH, ask(top_logprobs=2, max_tokens=3, stream=True))[:-1]]
    streamed = [e for f in frames if (found := f["choices"][0]["logprobs"]) for e in found["content"]]
    assert [e["token"] for e in streamed] == [e["token"] for e in content]


def test_a_named_tool(mindie):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"town": {"enum": ["Rome", "Oslo"]}}, "required": ["town"]}}}  # fmt: skip
    body = ask(tools=[tool], tool_choice={"type": "function", "function": {"name": "weather"}}, max_tokens=200)
    choice = mindie.post(PATH, body).json()["choices"][0]
    call = choice["message"]["tool_calls"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert call["type"] == "function"
    assert len(call["id"]) == len("call_") + 8
    assert json.loads(call["function"]["arguments"])["town"] in ("Rome", "Oslo")
    frames = [json.loads(f[6:]) for f in chunks(mindie, PATH, {**body, "stream": True})[:-1]]
    deltas = [d for f in frames for d in f["choices"][0]["delta"].get("tool_calls", [])]
    assert deltas[0]["function"] == {"name": "weather"}
    assert "".join(d["function"].get("arguments", "") for d in deltas) == call["function"]["arguments"]


def test_structured_output(mindie):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    body = ask(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    content = mindie.post(PATH, body).json()["choices"][0]["message"]["content"]
    assert list(json.loads(content)) == ["a"]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model": None}, "Request contains not model or model null"),
        ({"model": 5}, "Request param model must be string"),
        ({"model": ""}, "Request param model must be not empty"),
        ({"model": "x"}, "Model not found"),
        ({"messages": None}, "Request param contains not messages or messages null"),
        ({"messages": []}, "Request param messages not arr or arr is empty"),
        ({"messages": "x"}, "Request param messages not arr or arr is empty"),
        ({"messages": [{"role": "user"}]}, "Request param contains not content or content null"),
        ({"messages": [{"content": "a"}]}, "Request param contains not role or role null"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "Request param \"content\" should not be empty"),
        ({"messages": [{"role": "user", "content": []}]}, "Inputs arr is empty"),
        ({"temperature": -1}, "Parameter temperature must be in (0.0,3.40282e+38], got -1."),
        ({"repetition_penalty": 2.1}, "Parameter 'repetition_penalty' must be in (0.0, 2], got 2.1."),
        ({"top_logprobs": 21}, "Parameter top logprobs must be in [0, 20], got 21."),
        ({"top_logprobs": 1, "logprobs": False}, "Value error, when using top_logprobs, logprobs must be true or null in chat completions"),
        ({"max_tokens": 1.5}, "Parameter max_tokens not number_integer"),
        ({"max_tokens": 0}, "Parameter max_tokens must be (0,2147483647], got 0"),
        ({"use_beam_search": True},
         "Please set the max_tokens to be not larger than 128 when the use_beam_search is on."),
        ({"tool_choice": "maybe"}, "Parameter tool_choice string not in [none, auto, required]"),
        ({"stream": True, "best_of": 2, "temperature": 1},
         "best_of must be equal to n in stream mode, but best_of is 2, n is None."),
        ({"chat_template": "x"}, "chat_template is not supported by this endpoint"),
        ({"response_format": {"type": "xml"}}, "Parameter response_format.type must be 'json_object', 'json_schema' or 'text', got 'xml'"),
    ],
)  # fmt: skip
def test_refused(mindie, fields, error):
    mindie.refused(PATH, ask(**fields), error)


@pytest.mark.parametrize("fields", [{"max_completion_tokens": -5}, {"user": 5}, {"logit_bias": "x"}, {"tools": []},
                                    {"top_p": 1}, {"top_k": -1}, {"stream_options": 1}])  # fmt: skip
def test_ignored_and_accepted(mindie, fields):
    assert mindie.post(PATH, ask(max_tokens=1, **fields)).status_code == 200


def test_malformed(mindie):
    for body in (b"{", b"[]", b""):
        mindie.refused(PATH, body, "Failed to parse request context to json")
