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


@pytest.mark.live
def test_golden(mindie):
    golden(
        mindie.post(PATH, ask()).content,
        '{"id":"<id>","object":"chat.completion","created":<n>,"model":"demo","choices":[{"index":0,"message":'
        '{"role":"assistant","content":"' + ANSWER + '","tool_calls":[]},"logprobs":null,"finish_reason":"stop"}],'
        '"usage":{"prompt_tokens":<n>,"prompt_tokens_details":{"cached_tokens":<n>},"completion_tokens":<n>,'
        '"total_tokens":<n>}}',
    )


@pytest.mark.live
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


@pytest.mark.live
def test_several_sequences(mindie):
    body = ask(n=2, temperature=1.0, seed=1, max_tokens=5)
    assert [c["index"] for c in mindie.post(PATH, body).json()["choices"]] == [0, 1]
    frames = [json.loads(f[6:]) for f in chunks(mindie, PATH, {**body, "stream": True})[:-1]]
    assert [f["choices"][0]["index"] for f in frames[:2]] == [0, 1]
    assert sum("usage" in frame for frame in frames) == 2


@pytest.mark.live
def test_logprobs(mindie):
    choice = mindie.post(PATH, ask(top_logprobs=2, max_tokens=3)).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 3
    assert all(len(entry["top_logprobs"]) == 2 and entry["bytes"] == list(entry["token"].encode()) for entry in content)
    frames = [json.loads(f[6:]) for f in chunks(mindie, PATH, ask(top_logprobs=2, max_tokens=3, stream=True))[:-1]]
    streamed = [e for f in frames if (found := f["choices"][0]["logprobs"]) for e in found["content"]]
    assert [e["token"] for e in streamed] == [e["token"] for e in content]


@pytest.mark.live
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


@pytest.mark.live
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


def message(**fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "a"}, fields]}


def call(**changes: object) -> dict[str, object]:
    """An assistant's message with one call; None removes a field of it."""
    fields = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, **changes}
    return message(role="assistant", tool_calls=[{k: v for k, v in fields.items() if v is not None}])


TOOLS = [{"type": "function", "function": {"name": "f"}}]
NO_CALLS = {"role": "assistant", "content": "", "tool_calls": []}
CONTENT = "Request param contains not content or content null"
NAME = ("The name of function must be a-z, A-Z, 0-9, common chinese characters, underscores and dashe within max length of "
        "64, unexpected function name: ")  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"messages": [5]}, "Request param contains not role or role null"),
        (message(role="user", content=5), "The type of inputs is abnormal"),
        (message(role="tool", content="x"),
         "Request param contains not tool_call_id or tool_call_id null while role is tool"),
        (message(role="tool", content="x", tool_call_id=5), "The type of tool_call_id is abnormal"),
        (message(role="tool", content="x", tool_call_id=""),
         "Request param tool_call_id len should not be 0 while role is tool"),
        (message(role="assistant"), CONTENT),
        (message(role="assistant", content=5), 'Request param "content" arguments expected to be a string'),
        (message(role="assistant", tool_calls="x"), "Tool call param contains no id."),
        (call(id=None), "Tool call param contains no id."),
        (call(id=5), 'Tool call param "id" arguments expected to be a string'),
        (call(type=None), "The type of the tool. Currently, only function is supported."),
        (call(function=None), "Tool call param contains no function that the model called."),
        (call(function={"arguments": "{}"}), "Tool call param contains no function name"),
        (call(function={"name": 5}), "Tool call param function name expected to be a string"),
        (call(function={"name": "a b", "arguments": "{}"}), f"{NAME}a b"),
        (call(function={"name": "f"}), "Tool call param contains no function arguments"),
        (call(function={"name": "f", "arguments": {}}), "Tool call param function arguments expected to be a string"),
        ({"messages": None, "tools": TOOLS}, "Request param messages is null"),
        ({"messages": [], "tools": TOOLS}, "Request param messages is not arr or arr is empty"),
        ({**message(role="critic", content="x"), "tools": TOOLS},
         "Request param contains role must be system, assistant, user or tool"),
        ({**message(role="user", content=""), "tools": TOOLS}, "Request param content len should not be 0"),
        ({"tool_choice": 5}, "Parameter tool_choice not string or object"),
        ({"tool_choice": {}}, "Tool param invalid, tool type not exist"),
        ({"tools": "x"}, "Tools not array"),
        ({"tools": [5]}, "Tool param invalid, tool type not exist"),
        ({"tools": [{"type": None}]}, "Tool param invalid tool type"),
        ({"tools": [{"type": 5}]}, "Tool param invalid tool string type"),
        ({"tools": [{"type": "x"}]}, "Tool param not function type"),
        ({"tools": [{"type": "function"}]}, "Tool param invalid, tool function not exist"),
        ({"tools": [{"type": "function", "function": None}]}, "Tool param invalid function object"),
        ({"tools": [{"type": "function", "function": {}}]}, "Function object invalid, function name not exist"),
        ({"tools": [{"type": "function", "function": {"name": 5}}]}, "Function object invalid name type"),
        ({"tools": [{"type": "function", "function": {"name": "f#"}}]}, f"{NAME}f#"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs must be a JSON object"),
        ({"chat_template_kwargs": {"enable_thinking": "x"}}, "enable_thinking must be boolean, got string"),
        ({"chat_template_kwargs": {"thinking_budget": "x"}}, "thinking_budget must be integer type."),
        ({"chat_template_kwargs": {"thinking_budget": 0}},
         "Parameter thinking_budget must be in [1,2147483647], got 0"),
        ({"chat_template_kwargs": {"enable_thinking": True, "thinking_budget": 5}},
         "thinking_budget is not supported by this endpoint"),
        ({"chat_template": 5}, "Parameter chat_template not string"),
        ({"chat_template": ""}, "Parameter chat_template is not valid"),
        # What comes first is reported: the choice, the tools, the template, the messages, then the parameters in their order.
        ({"tool_choice": 5, "tools": "x", "messages": []}, "Parameter tool_choice not string or object"),
        ({"tools": "x", "chat_template": "", "messages": []}, "Tools not array"),
        ({"chat_template": "", "messages": []}, "Parameter chat_template is not valid"),
        ({"chat_template_kwargs": {"thinking_budget": 0}, "seed": -1}, "seed must be unsigned type."),
        ({"chat_template_kwargs": {"thinking_budget": 0}, "repetition_penalty": 0},
         "Parameter thinking_budget must be in [1,2147483647], got 0"),
    ],
)  # fmt: skip
def test_messages_and_tools_that_are_refused(mindie, fields, error):
    mindie.refused(PATH, ask(**fields), error)


def test_an_answer_without_calls_is_accepted_as_a_message(mindie):
    """MindIE's answers always have `tool_calls`, which clients send back."""
    for said in ({**NO_CALLS, "content": "b"}, NO_CALLS, {"role": "assistant", "tool_calls": []}):
        messages = [{"role": "user", "content": "a"}, said, {"role": "user", "content": "c"}]
        assert mindie.post(PATH, ask(messages=messages, max_tokens=1)).status_code == 200


def test_malformed(mindie):
    for body in (b"{", b"[]", b""):
        mindie.refused(PATH, body, "Failed to parse request context to json")
