"""Answers with calls between texts, whose pieces come with any number of tokens in one output."""

from __future__ import annotations

import pytest

from tests.unit.scripts import says

CALL = '<tool_call>{"name": "clock", "arguments": {"zone": "UTC"}}</tool_call>'
TEXT = f"First.{CALL} Then one more.{CALL}{CALL} Done."
FLAT = {"type": "function", "name": "clock", "parameters": {"type": "object"}}
ARGUMENTS = '{"zone": "UTC"}'


@pytest.mark.parametrize("per_step", [1, 2, 3, 4, 5, 7, 11, 16, 1000])
async def test_a_response_has_them_in_the_models_order(serving, per_step):
    serving.worker.scripts += [says(TEXT, per_step=per_step)]
    body = {"model": "demo", "input": "When?", "tools": [FLAT], "stream": True}
    events = (await serving.post("/v1/responses", body)).events
    output = events[-1]["response"]["output"]
    assert [item.get("arguments") or item["content"][0]["text"] for item in output] == [
        "First.", ARGUMENTS, " Then one more.", ARGUMENTS, ARGUMENTS, " Done.",
    ]  # fmt: skip
    for index, item in enumerate(output):
        own = [event for event in events if event.get("output_index") == index]
        assert own == sorted(own, key=lambda event: event["sequence_number"])
        shown = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert shown == (item.get("arguments") or item["content"][0]["text"])


@pytest.mark.parametrize("per_step", [1, 3, 7, 1000])
async def test_a_chat_has_texts_and_calls_apart(serving, per_step):
    serving.worker.scripts += [says(TEXT, per_step=per_step)]
    body = {"model": "demo", "messages": [{"role": "user", "content": "When?"}], "stream": True,
            "tools": [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]}  # fmt: skip
    deltas = [e["choices"][0]["delta"] for e in (await serving.post("/v1/chat/completions", body)).events[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "First. Then one more. Done."
    arguments = ["", "", ""]
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        arguments[call["index"]] += call["function"]["arguments"]
    assert arguments == [ARGUMENTS] * 3
