"""Chats as TGI's router answers them: for its clients, whose model is `tgi` or `dummy`, and on its own routes."""

from __future__ import annotations

import pytest

from inference.generation.requests import TextPrompt
from tests.unit.scripts import ids, says

CHAT = "/v1/chat/completions"
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {
    "type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}}}  # fmt: skip
CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
HELLO = [{"role": "user", "content": "Hello"}]
BEGUN = [*HELLO, {"role": "assistant", "content": "The capital"}]


def deltas(answer):
    """Of every chunk with a choice."""
    assert answer.events[-1] == "[DONE]"
    return [event["choices"][0]["delta"] for event in answer.events[:-1] if event["choices"]]


@pytest.mark.parametrize("model", ["tgi", "dummy"])
@pytest.mark.parametrize(("choice", "text"), [
    ({}, CALL), ({"tool_choice": "clock"}, '{"zone": "UTC"}'),
    ({"tool_choice": "required"}, '[{"name": "clock", "arguments": {"zone": "UTC"}}]'),
])  # fmt: skip
async def test_every_chunk_of_a_called_tool_has_a_piece_of_the_call(serving, model, choice, text):
    serving.worker.scripts.append(says(text))
    answer = await serving.post(CHAT, {"messages": HELLO, "model": model, "stream": True, "tools": [CLOCK], **choice})
    name = arguments = ""
    numbers = set()
    for delta in deltas(answer):
        assert delta["role"] == "assistant"
        assert delta.get("content") is None
        (piece,) = delta["tool_calls"]
        assert (piece["index"], piece["type"], list(piece["function"])) == (0, "function", ["name", "arguments"])
        numbers.add(piece["id"])
        function = piece["function"]
        name += function.get("name") or ""
        arguments += function["arguments"]
    assert (name, arguments) == ("clock", '{"zone": "UTC"}')
    assert len(numbers) == 1


async def test_every_chunk_without_a_call_has_content(serving):
    serving.worker.scripts.append(says(" of Spain"))
    answer = await serving.post(CHAT, {"messages": HELLO, "model": "tgi", "stream": True, "tools": [CLOCK]})
    assert all("tool_calls" not in delta for delta in deltas(answer))
    assert "".join(delta["content"] for delta in deltas(answer)) == " of Spain"


@pytest.mark.parametrize("model", ["tgi", "dummy", "http://127.0.0.1:8080"])
@pytest.mark.parametrize("fields", [
    {"tools": []}, {"tools": [], "tool_choice": "auto"}, {"tools": [], "tool_choice": "required"}, {"tool_choice": "auto"},
])  # fmt: skip
async def test_no_tools_are_no_error_to_the_router(serving, model, fields):
    for stream in (False, True):
        serving.worker.scripts.append(says(" of Spain"))
        answer = await serving.post(CHAT, {"messages": HELLO, "model": model, "stream": stream, **fields})
        if stream:
            assert "".join(delta["content"] for delta in deltas(answer)) == " of Spain"
        else:
            assert answer.json()["choices"][0]["message"]["content"] == " of Spain"


@pytest.mark.parametrize(("fields", "param"), [
    ({"model": "demo", "tools": []}, "tools"), ({"model": "demo", "tool_choice": "auto"}, "tool_choice"),
    ({"model": "tgi", "tools": [], "tool_choice": {"type": "function", "function": {"name": "clock"}}}, "tool_choice"),
])  # fmt: skip
async def test_no_tools_are_an_error_to_other_clients_and_to_a_choice_that_names_one(serving, fields, param):
    answer = await serving.post(CHAT, {"messages": HELLO, **fields})
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)


async def test_other_clients_streams_open_with_the_role(serving):
    for fields in ({}, {"model": "demo"}, {"model": "tgi", "echo": True}):
        answer = await serving.post(CHAT, {"messages": HELLO, "stream": True, **fields})
        first, second, *_ = deltas(answer)
        assert first == {"role": "assistant", "content": ""}
        assert "role" not in second


async def test_a_bare_name_chooses_a_tool(serving):
    serving.worker.scripts.append(says('{"zone": "UTC"}'))
    answer = await serving.post(CHAT, {"messages": HELLO, "tools": [CLOCK], "tool_choice": "clock"})
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "clock", "arguments": '{"zone": "UTC"}'}
    assert serving.worker.submits[0].params.grammar.kind == "json_schema"
    for fields in ({"tools": [CLOCK], "tool_choice": "watch"}, {"tool_choice": "clock"}):
        answer = await serving.post(CHAT, {"messages": HELLO, **fields})
        assert (answer.status, answer.json()["error"]["param"]) == (400, "tool_choice")


async def prompt_of(serving, path: str, body: object) -> str:
    """What the worker was asked to continue."""
    answer = await serving.post(path, body)
    assert answer.status == 200, answer.text
    tokenizer = serving.router.targets[0].tokenizer
    text: str = tokenizer.decode(serving.worker.submits[-1].prompt_token_ids)
    return text


async def test_a_final_assistant_message_is_continued(serving):
    for path, body in (
        (CHAT, {"messages": BEGUN, "model": "tgi"}),
        (CHAT, {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False}),
        ("/vertex", {"instances": [{"messages": BEGUN}]}),
    ):
        assert (await prompt_of(serving, path, body)).endswith("The capital")
    answer = await serving.post("/chat_tokenize", {"messages": BEGUN})
    assert answer.json()["templated_text"].endswith("The capital")


async def test_it_is_not_continued_for_others(serving):
    for fields in ({}, {"model": "demo"}, {"model": "tgi", "add_generation_prompt": True},
                   {"model": "tgi", "continue_final_message": False}):  # fmt: skip
        assert not (await prompt_of(serving, CHAT, {"messages": BEGUN, **fields})).endswith("The capital")
    called = {"role": "assistant", "content": "Hm", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    for final in ({"role": "assistant", "content": ""}, called, HELLO[0]):
        assert not (await prompt_of(serving, CHAT, {"messages": [*HELLO, final], "model": "tgi"})).endswith(
            "The capital"
        )


async def test_chunks_name_the_server(serving):
    for path, body in ((CHAT, {"messages": HELLO}), ("/v1/completions", {"prompt": "The capital"})):
        answer = await serving.post(path, {**body, "model": "tgi", "stream": True})
        assert all(chunk["system_fingerprint"].startswith("dragoman-") for chunk in answer.events[:-1])
        answer = await serving.post(path, {**body, "stream": True})
        assert not any("system_fingerprint" in chunk for chunk in answer.events[:-1])


async def test_the_last_chunk_of_each_prompt_has_its_usage(serving):
    prompts = ["The capital", "The capital of Spain"]
    serving.worker.scripts += [says(" of Spain"), says(" is Madrid.")]
    asked = {"prompt": prompts, "model": "tgi", "stream": True, "max_tokens": 20}
    chunks = (await serving.post("/v1/completions", asked)).events[:-1]
    tokenizer = serving.router.targets[0].tokenizer
    for index, prompt in enumerate(prompts):
        *before, last = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert not any("usage" in chunk for chunk in before)
        assert last["usage"]["prompt_tokens"] == len(await tokenizer.encode(TextPrompt(prompt)))
        assert last["usage"]["total_tokens"] > last["usage"]["prompt_tokens"]
    asked = {**asked, "stream_options": {"include_usage": True}}
    counted = (await serving.post("/v1/completions", asked)).events[-2]
    assert counted["choices"] == []


async def test_a_json_object_may_have_a_schema(serving):
    """As langchain-huggingface asks for one."""
    schema = {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]}
    for given, held in (({}, False), ({"schema": schema}, True), ({"schema": None}, False)):
        await serving.post(CHAT, {"messages": HELLO, "response_format": {"type": "json_object", **given}})
        assert ("zone" in str(serving.worker.submits[-1].params.grammar)) is held
    answer = await serving.post(CHAT, {"messages": HELLO, "response_format": {"type": "json_object", "schema": 5}})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "response_format")


@pytest.mark.parametrize("model", ["http://127.0.0.1:8000", "https://example.com/v1"])
async def test_a_url_as_model_means_the_default_deployment(serving, model):
    """huggingface.js sends it."""
    for path, body in ((CHAT, {"messages": HELLO}), ("/v1/completions", {"prompt": "The capital"})):
        answer = await serving.post(path, {**body, "model": model})
        assert (answer.status, answer.json()["model"]) == (200, "tgi")
        assert (await serving.post(path, {**body, "model": "ftp://example.com"})).status == 404


async def test_every_token_has_a_chunk(serving):
    """However many the engine sends at once."""
    text = " The capital of Spain is Madrid."
    for path, body in ((CHAT, {"messages": HELLO}), ("/v1/completions", {"prompt": "a"})):
        told = []
        for per_step in (1, 3, 100):
            serving.worker.scripts.append(says(text, per_step=per_step))
            asked = {**body, "model": "tgi", "stream": True, "max_tokens": 50}
            chunks = (await serving.post(path, asked)).events[:-1]
            told.append([{**chunk["choices"][0]} for chunk in chunks])
        assert told[0] == told[1] == told[2]
        assert len(told[0]) == len(ids(text)) + 1  # and one for the end token
