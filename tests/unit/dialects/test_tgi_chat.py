"""Chats as TGI's router answers them: for its clients, whose model is `tgi` or `dummy`, and on its own routes."""

from __future__ import annotations

import pytest

from tests.unit.scripts import says

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
    for delta in deltas(answer):
        assert delta["role"] == "assistant"
        assert delta.get("content") is None
        function = delta["tool_calls"][0]["function"]
        name += function.get("name") or ""
        arguments += function["arguments"]
    assert (name, arguments) == ("clock", '{"zone": "UTC"}')


async def test_every_chunk_without_a_call_has_content(serving):
    serving.worker.scripts.append(says(" of Spain"))
    answer = await serving.post(CHAT, {"messages": HELLO, "model": "tgi", "stream": True, "tools": [CLOCK]})
    assert all("tool_calls" not in delta for delta in deltas(answer))
    assert "".join(delta["content"] for delta in deltas(answer)) == " of Spain"


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
