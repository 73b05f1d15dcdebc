"""Tool calls and thoughts over HTTP. Grammars make the demo model write what a model with tools would."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.conftest import DEMO
from tests.live import LiveServer, events
from tests.unit.scripts import ids

PATH = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"$ref": "#/$defs/Town"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["town", "days"],
            "additionalProperties": False,
            "$defs": {"Town": {"enum": ["Paris", "Rome"]}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ASK = {"messages": [{"role": "user", "content": "How is the weather in Paris?"}], "max_tokens": 300, "temperature": 0}
CALL = '{"name": "get_weather", "arguments": {"town": "Paris", "days": 2}}'


def told(text: str) -> dict:
    """What makes the model say exactly this."""
    return {"structured_outputs": {"choice": [text]}}


def both(server, body: dict) -> dict:
    """The choice of the whole answer, after the streamed one was found to say the same."""
    whole = server.post(PATH, body)
    assert whole.status_code == 200, whole.text
    choice = whole.json()["choices"][0]
    message = choice["message"]
    chunks = [c["choices"][0] for c in events(server.post(PATH, {**body, "stream": True}))[:-1]]
    assert [c["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + [choice["finish_reason"]]
    calls: list[dict] = []
    for chunk in chunks:
        assert chunk["delta"]
        for entry in chunk["delta"].get("tool_calls", []):
            if "id" in entry:
                assert entry["index"] == len(calls)
                calls.append({"type": entry["type"], "function": dict(entry["function"])})
            else:
                calls[entry["index"]]["function"]["arguments"] += entry["function"]["arguments"]
    assert calls == [{k: v for k, v in call.items() if k != "id"} for call in message.get("tool_calls", [])]
    for key in ("content", "reasoning"):
        assert "".join(c["delta"].get(key) or "" for c in chunks) == (message[key] or "")
    return choice


@pytest.mark.live
def test_a_call_that_the_model_chooses(server):
    body = {**ASK, "tools": [WEATHER, CLOCK], **told(f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>")}
    choice = both(server, body)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    call = choice["message"]["tool_calls"][0]
    assert call["id"].startswith("chatcmpl-tool-")
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"town": "Paris", "days": 2}


FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {
    "type": "object", "properties": {"answer": {"enum": ["sunny", "rainy"]}}, "required": ["answer"],
    "additionalProperties": False}}}  # fmt: skip


@pytest.mark.live
def test_a_response_format_leaves_calls_possible(server):
    """Agents with an output type would never call their tools otherwise."""
    body = {**ASK, "tools": [WEATHER], "response_format": FORMAT, "parallel_tool_calls": False}
    calling = {**body, "logit_bias": {str(ids("<")[0]): 100}}
    choice = both(server, calling)
    (call,) = choice["message"]["tool_calls"][:1]
    assert (choice["message"]["content"], call["function"]["name"]) == (None, "get_weather")
    assert json.loads(call["function"]["arguments"])["town"] in ("Paris", "Rome")
    answering = {**body, "logit_bias": {str(ids("<")[0]): -100}}
    choice = both(server, answering)
    assert json.loads(choice["message"]["content"])["answer"] in ("sunny", "rainy")
    choice = both(server, {**calling, "tool_choice": "none"})
    assert json.loads(choice["message"]["content"])["answer"] in ("sunny", "rainy")


@pytest.mark.live
@pytest.mark.parametrize("tools", [[WEATHER], [WEATHER, CLOCK]])
def test_a_required_call_that_is_cut_shows_no_part_of_it_as_content(server, tools):
    body = {**ASK, "tools": tools, "tool_choice": "required"}
    for length in range(1, 61):
        message = both(server, {**body, "max_tokens": length})["message"]
        assert not message["content"], length


@pytest.mark.live
def test_no_call_is_an_ordinary_answer(server):
    choice = both(server, {**ASK, "tools": [CLOCK], **told("It is fine < today.")})
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "It is fine < today.")
    assert "tool_calls" not in choice["message"]
    text = f"<tool_call>{CALL}</tool_call>"
    choice = both(server, {**ASK, "tools": [CLOCK], "tool_choice": "none", **told(text)})
    assert choice["message"]["content"] == text


@pytest.mark.live
def test_only_the_first_call_where_they_may_not_be_parallel(server):
    text = f"<tool_call>{CALL}</tool_call>" * 2
    many = both(server, {**ASK, "tools": [WEATHER], **told(text)})
    assert len(many["message"]["tool_calls"]) == 2
    assert len({call["id"] for call in many["message"]["tool_calls"]}) == 2
    one = both(server, {**ASK, "tools": [WEATHER], "parallel_tool_calls": False, **told(text)})
    assert len(one["message"]["tool_calls"]) == 1
    assert one["message"]["content"] is None


@pytest.mark.live
def test_a_call_that_is_cut_off_keeps_what_it_has(server):
    body = {**ASK, "tools": [WEATHER], **told(f"<tool_call>{CALL}</tool_call>"), "max_tokens": 24}
    choice = both(server, body)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


@pytest.mark.live
@pytest.mark.parametrize("temperature", [0, 1])
def test_calls_that_must_be_made_follow_the_definitions(server, temperature):
    body = {**ASK, "tools": [WEATHER, CLOCK], "temperature": temperature, "seed": 5}
    named = both(server, {**body, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}})
    assert named["finish_reason"] == "stop"
    assert [call["function"]["name"] for call in named["message"]["tool_calls"]] == ["get_weather"]
    arguments = json.loads(named["message"]["tool_calls"][0]["function"]["arguments"])
    assert arguments["town"] in ("Paris", "Rome")
    assert 1 <= arguments["days"] <= 9
    required = both(server, {**body, "tool_choice": "required", "parallel_tool_calls": False})
    assert required["finish_reason"] == "tool_calls"
    (call,) = required["message"]["tool_calls"]
    assert call["function"]["name"] in ("get_weather", "clock")
    assert isinstance(json.loads(call["function"]["arguments"]), dict)


def test_a_conversation_with_calls_goes_to_the_template(server):
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"town": "Paris"}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "Sunny."},
    ]  # fmt: skip
    assert server.post(PATH, {**ASK, "messages": messages, "tools": [WEATHER]}).status_code == 200
    for arguments in ("{", "[1]", 5, "[" * 2000):  # as a model may have left them
        messages[1]["tool_calls"][0]["function"]["arguments"] = arguments
        assert server.post(PATH, {**ASK, "messages": messages, "tools": [WEATHER]}).status_code == 200


BAD = [
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
    ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools"),
    ({"tools": [CLOCK, CLOCK]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]}, "tools"),
    ({"tools": [CLOCK] * 129}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$defs": [1]}}}], "tool_choice": "required"},
     "tools"),
    ({"tools": [CLOCK], "tool_choice": "always"}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"function": 5}}, "tool_choice"),
    pytest.param(  # the engine's compiler reads the schema
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 7}}}], "tool_choice": "required"},
        "tools", marks=pytest.mark.live),
]  # fmt: skip


@pytest.mark.parametrize(("change", "field"), BAD)
def test_bad_tools_are_named(server, change, field):
    refused = server.post(PATH, {**ASK, **change})
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == field


@pytest.mark.parametrize("levels", [126, 129, 500, 990, 5000])
def test_nesting_is_limited_everywhere(server, levels):
    nested = "[" * (levels - 3) + "]" * (levels - 3)
    fields = [
        f'"tools": [{{"type": "function", "function": {{"name": "f", "parameters": {{"x": {nested}}}}}}}]',
        f'"structured_outputs": {{"structural_tag": {{"structures": [{nested}], "triggers": ["<"]}}}}',
        f'"chat_template_kwargs": {{"x": {nested}}}',
    ]
    for field in fields:
        body = f'{{"messages": [{{"role": "user", "content": "hi", "x": {nested}}}], "max_tokens": 1, {field}}}'
        response = server.post(PATH, body)
        assert response.status_code == 400 if levels > 128 else response.status_code in (200, 400), response.text


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """The demo model under a template that leaves it thinking and writes calls as Mistral's do."""
    directory = tmp_path_factory.mktemp("thinker") / "thinker"
    shutil.copytree(DEMO, directory, ignore=shutil.ignore_patterns("adapters"))
    (directory / "chat_template.jinja").write_text(
        "{#- [TOOL_CALLS] -#}{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n{% if quick is not defined %}<think>\n{% else %}</think>{% endif %}"
    )
    live = LiveServer(tmp_path_factory.mktemp("thinker-server") / "var", model=str(directory)).start()
    yield live
    assert live.stop() == 0, live.log


@pytest.mark.full
@pytest.mark.live
def test_thoughts_stand_apart(thinker):
    choice = both(thinker, {**ASK, **told("Hm.\n</think>\n\nIt is sunny.")})
    assert choice["message"]["reasoning"] == choice["message"]["reasoning_content"] == "Hm.\n"
    assert choice["message"]["content"] == "\n\nIt is sunny."
    hidden = thinker.post(PATH, {**ASK, **told("Hm.</think>Sunny."), "include_reasoning": False}).json()
    message = hidden["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (None, "Sunny.")
    body = {**ASK, **told("Hm.</think>Sunny."), "include_reasoning": False, "logprobs": True, "return_token_ids": True}
    choice = thinker.post(PATH, body).json()["choices"][0]
    assert (choice["logprobs"], choice["token_ids"]) == (None, None)
    chunks = [c["choices"][0] for c in events(thinker.post(PATH, {**body, "stream": True}))[:-1]]
    assert all(chunk["logprobs"] is None and "token_ids" not in chunk for chunk in chunks)
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == "Sunny."
    quick = both(thinker, {**ASK, **told("Sunny."), "chat_template_kwargs": {"quick": True}})
    assert (quick["message"]["reasoning"], quick["message"]["content"]) == (None, "Sunny.")
    chosen = both(thinker, {**ASK, **told("<think>a</think>b"), "chat_template_kwargs": {"quick": True}})
    assert (chosen["message"]["reasoning"], chosen["message"]["content"]) == ("a", "b")


@pytest.mark.full
@pytest.mark.live
def test_thoughts_come_before_calls(thinker):
    text = f"Hm.</think>\n[TOOL_CALLS][{CALL}]"
    choice = both(thinker, {**ASK, "tools": [WEATHER], **told(text)})
    assert (choice["finish_reason"], choice["message"]["reasoning"]) == ("tool_calls", "Hm.")
    (call,) = choice["message"]["tool_calls"]
    assert len(call["id"]) == 9
    assert call["id"].isalnum()
    assert json.loads(call["function"]["arguments"]) == {"town": "Paris", "days": 2}
