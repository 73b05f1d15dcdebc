"""POST /v1/responses, and the types of bodies on /v1."""

from __future__ import annotations

import json

import pytest

QUESTION = "What is the capital of Spain?"
ANSWER = "The capital of Spain is Madrid."


def stream(answer):
    """(event name, data) of every event."""
    parts = [part.split("\n", 1) for part in answer.text.split("\n\n") if part]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]


@pytest.mark.live
@pytest.mark.parametrize(
    "given",
    [QUESTION, [{"role": "user", "content": QUESTION}],
     [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]],
)  # fmt: skip
def test_whole(server, given):
    answer = server.post("/v1/responses", {"model": "demo", "input": given, "temperature": 0}).json()
    assert answer["status"] == "completed"
    assert answer["output"][0]["content"][0]["text"] == ANSWER
    assert answer["usage"]["total_tokens"] == answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"]


@pytest.mark.live
def test_stream(server):
    answer = server.post("/v1/responses", {"input": QUESTION, "temperature": 0, "stream": True})
    events = stream(answer)
    names = [name for name, _ in events]
    deltas = names.count("response.output_text.delta")
    assert names == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * deltas, "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert all(data["type"] == name for name, data in events)
    assert "".join(d["delta"] for name, d in events if name == "response.output_text.delta") == ANSWER
    assert events[-1][1]["response"]["output"][0]["content"][0]["text"] == ANSWER
    assert "[DONE]" not in answer.text


def test_cut_short(server):
    answer = server.post("/v1/responses", {"input": QUESTION, "temperature": 0, "max_output_tokens": 3}).json()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    events = stream(server.post("/v1/responses", {"input": QUESTION, "max_output_tokens": 3, "stream": True}))
    assert events[-1][0] == "response.incomplete"


@pytest.mark.live
def test_function_calls(server):
    tool = {"type": "function", "name": "weather", "parameters": {
        "type": "object", "properties": {"town": {"enum": ["Rome", "Oslo"]}}, "required": ["town"]}}  # fmt: skip
    body = {
        "input": QUESTION,
        "tools": [tool],
        "tool_choice": {"type": "function", "name": "weather"},
        "temperature": 0,
    }
    call = server.post("/v1/responses", body).json()["output"][0]
    assert (call["type"], call["name"]) == ("function_call", "weather")
    events = stream(server.post("/v1/responses", {**body, "stream": True}))
    done = next(d for name, d in events if name == "response.function_call_arguments.done")
    assert done["arguments"] == call["arguments"]
    history = [{"role": "user", "content": QUESTION}, call,
               {"type": "function_call_output", "call_id": call["call_id"], "output": "fine"}]  # fmt: skip
    assert server.post("/v1/responses", {"input": history, "max_output_tokens": 4}).status_code == 200


@pytest.mark.live
def test_vllms_own_fields(server):
    regex = {"structured_outputs": {"regex": "[ab]{3}"}, "seed": 5, "top_k": 3, "min_p": 0.1, "logit_bias": {"5": 1}}
    answer = server.post("/v1/responses", {"input": QUESTION, **regex}).json()
    assert set(answer["output"][0]["content"][0]["text"]) <= set("ab")
    answer = server.post("/v1/responses", {"input": QUESTION, "temperature": 0, "stop": " Spain"}).json()
    assert answer["output"][0]["content"][0]["text"] == "The capital of"
    shown = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "enable_response_messages": True}
    answer = server.post("/v1/responses", {"input": QUESTION, "temperature": 0, **shown}).json()
    assert [len(entry["top_logprobs"]) for entry in answer["output"][0]["content"][0]["logprobs"]][:3] == [2, 2, 2]
    assert QUESTION in answer["input_messages"][0]["message"]
    assert answer["output_messages"][0]["message"].startswith(ANSWER)
    assert len(answer["output_messages"][0]["tokens"]) == answer["usage"]["output_tokens"]


def test_a_long_input_is_truncated_if_asked_for(server):
    long = "one two three four five six seven " * 1000
    refused = server.post("/v1/responses", {"input": long, "max_output_tokens": 1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    answer = server.post("/v1/responses", {"input": long, "max_output_tokens": 1, "truncation": "auto"})
    assert answer.status_code == 200, answer.text


@pytest.mark.live
def test_an_unfinished_answer_is_continued(server):
    begun = {"type": "message", "role": "assistant", "status": "incomplete", "id": "msg_1",
             "content": [{"type": "output_text", "text": "The capital of Spain is", "annotations": []}]}  # fmt: skip
    body = {"input": [{"role": "user", "content": QUESTION}, begun], "temperature": 0}
    answer = server.post("/v1/responses", body).json()
    assert answer["output"][0]["content"][0]["text"].strip() == "Madrid."


@pytest.mark.live
def test_calls_of_every_kind_of_tool(server):
    patch = {"type": "custom", "name": "patch"}
    spaced = {"type": "namespace", "name": "sky", "tools": [{"type": "function", "name": "weather"}]}
    body = {"input": QUESTION, "tools": [patch, spaced], "temperature": 0, "max_output_tokens": 40}
    call = server.post("/v1/responses", {**body, "tool_choice": {"type": "custom", "name": "patch"}}).json()["output"][
        0
    ]
    assert (call["type"], call["name"], "status" in call) == ("custom_tool_call", "patch", False)
    named = {**body, "tool_choice": {"type": "function", "name": "weather"}}
    other = server.post("/v1/responses", named).json()["output"][0]
    assert (other["type"], other["name"], other["namespace"]) == ("function_call", "weather", "sky")
    history = [{"role": "user", "content": QUESTION}, {"type": "reasoning", "summary": [{"text": "Hm."}]}, call, other,
               {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "fine"}]  # fmt: skip
    assert server.post("/v1/responses", {**body, "input": history}).status_code == 200


@pytest.mark.live
def test_structured_text(server):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    body = {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}
    text = server.post("/v1/responses", body).json()["output"][0]["content"][0]["text"]
    assert list(json.loads(text)) == ["a"]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input": None}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": [{"type": "item_reference"}]}, 400, "input[0]"),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "x", "summary": []}]},
            400,
            "input[0].encrypted_content",
        ),
        ({"input": [{"type": "reasoning", "summary": [5]}]}, 400, "input[0].content"),
        ({"input": [{"type": "function_call", "call_id": "1"}]}, 400, "input[0].name"),
        ({"input": [{"role": "user", "content": "a", "status": "incomplete"}]}, 400, "input"),
        ({"previous_response_id": "x"}, 404, None),
        ({"previous_input_messages": [{}]}, 400, "previous_input_messages"),
        ({"background": True}, 400, "background"),
        ({"tools": [{"type": "web_serch"}]}, 400, "tools"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, 400, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, 400, "tool_choice"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, 400, "input[0]"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"tools": [{"type": "custom"}]}, 400, "tools"),
        ({"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar"}}]}, 400, "tools"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": 5}]}, 400, "tools"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "mcp", "name": "b"}]}]}, 400, "tools"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "a"}}, 400, "tool_choice"),
        ({"tool_choice": {"type": "mcp", "name": "a"}}, 400, "tool_choice"),
        ({"truncation": "sometimes"}, 400, "truncation"),
        ({"top_logprobs": 30}, 400, "top_logprobs"),
        ({"min_p": 2}, 400, "min_p"),
        ({"stop": ""}, 400, "stop"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, 400, "structured_outputs"),
        ({"model": "none"}, 404, "model"),
        ({"temperature": 3}, 400, "temperature"),
    ],
)
def test_refused(server, fields, status, param):
    answer = server.post("/v1/responses", {"input": "a", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


@pytest.mark.parametrize("kind", [
    "web_search", "web_search_preview", "web_search_2025_08_26", "web_search_preview_2025_03_11", "file_search",
    "code_interpreter", "image_generation", "mcp", "computer_use_preview", "local_shell", "shell", "apply_patch",
    "tool_search",
])  # fmt: skip
def test_tools_that_do_not_run_here_are_named_and_not_offered(server, kind):
    """Agents list them unasked."""
    plain = server.post("/v1/responses", {"input": "a", "temperature": 0, "max_output_tokens": 1}).json()
    hosted = [{"type": kind, "server_label": "x"}]
    answer = server.post("/v1/responses", {"input": "a", "temperature": 0, "max_output_tokens": 1, "tools": hosted})
    assert answer.status_code == 200, answer.text
    assert answer.json()["tools"] == hosted
    assert answer.json()["usage"]["input_tokens"] == plain["usage"]["input_tokens"]
    beside = [*hosted, {"type": "function", "name": "f", "parameters": {"type": "object"}}]
    required = {"input": "a", "max_output_tokens": 1, "tools": beside, "tool_choice": "required"}
    assert server.post("/v1/responses", required).status_code == 200


@pytest.mark.parametrize(("form", "told"), [
    ({"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}, "(lark):\nstart: /a+/"),
    ({"type": "grammar", "syntax": "regex", "definition": "a+"}, "(regex):\na+"),
])  # fmt: skip
def test_the_grammar_of_a_custom_tool_is_told_to_the_model(server, form, told):
    tool = {"type": "custom", "name": "patch", "description": "Patches.", "format": form}
    body = {"input": "a", "tools": [tool], "max_output_tokens": 1, "enable_response_messages": True}
    answer = server.post("/v1/responses", body)
    assert answer.status_code == 200, answer.text
    assert told in answer.json()["input_messages"][0]["message"]


CODES = [
    ({"input": "one two three four " * 3000}, {}, 400, "context_length_exceeded", "input"),
    ({"input": "a", "model": "none"}, {}, 404, "model_not_found", "model"),
    ({"input": "a", "temperature": 9}, {}, 400, None, "temperature"),
]


@pytest.mark.parametrize(("body", "headers", "status", "code", "param"), CODES)
def test_the_code_of_an_error_is_a_text_or_null(server, body, headers, status, code, param):
    answer = server.post("/v1/responses", body, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)


def test_nothing_is_kept(server):
    for answer in (server.get("/v1/responses/resp_1"), server.post("/v1/responses/resp_1/cancel", {})):
        assert answer.status_code == 404
        assert "resp_1" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses"])
def test_bodies_that_say_they_are_no_json(server, path):
    for kind in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x"):
        answer = server.post(path, {"prompt": "a", "max_tokens": 1}, headers={"content-type": kind})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "Unsupported Media Type: Only 'application/json' is allowed"


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "application/vnd.x+json", ""])
@pytest.mark.parametrize("accept", ["application/json", "text/event-stream", "image/png"])
def test_other_types_are_taken(server, kind, accept):
    headers = {"accept": accept, **({"content-type": kind} if kind else {})}
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=headers).status_code == 200


def test_named_logprobs(server):
    ids = [5, 6, 7]
    body = {
        "prompt": "a",
        "max_tokens": 2,
        "temperature": 0,
        "logprobs": 0,
        "logprob_token_ids": ids,
        "return_tokens_as_token_ids": True,
    }
    logprobs = server.post("/v1/completions", body).json()["choices"][0]["logprobs"]
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert set(top) == {token, *(f"token_id:{i}" for i in ids)}
