"""The output items of a response, and the events about them."""

from __future__ import annotations

from inference.dialects.openai.response_items import OutputItems
from inference.dialects.openai.responses_tools import ToolNames


def kinds(events) -> list[str]:
    return [kind for kind, _ in events]


def test_each_item_is_begun_and_ended():
    items = OutputItems("1", ToolNames(None))
    seen = kinds(items.reasoning("Hm")) + kinds(items.reasoning(".")) + kinds(items.text("Yes", []))
    seen += kinds(items.call("c", "clock", "{")) + kinds(items.call(None, None, "}")) + kinds(items.close("incomplete"))
    assert seen == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
    ]  # fmt: skip
    assert [(item["type"], item["status"]) for item in items.done] == [
        ("reasoning", "completed"), ("message", "completed"), ("function_call", "incomplete"),
    ]  # fmt: skip
    assert items.done[0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert items.done[2]["arguments"] == "{}"


def test_ids_are_each_their_own():
    items = OutputItems("1", ToolNames([{"type": "custom", "name": "patch"}]))
    for events in (items.text("a", []), items.call("c", "patch", '{"input": "x"}'), items.text("b", []), items.close()):
        for _ in events:
            pass
    assert [item["id"] for item in items.done] == ["msg_1", "ctc_c", "msg_1_2"]
    assert items.done[1]["input"] == "x"


def test_nothing_is_ended_that_was_not_begun():
    items = OutputItems("1", ToolNames(None))
    assert items.empty
    assert not list(items.close())
