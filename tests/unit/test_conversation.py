"""What the chat template gets of a conversation's messages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inference.chat.conversation import parse_messages
from inference.chat.template_environment import environment
from inference.dialects.openai.responses_input import messages_of
from inference.errors import InvalidRequest, NotServed
from inference.generation.requests import ChatPrompt
from inference.workers.tokenizer import ModelTokenizer
from tests.unit.scripts import model_info

TOKENIZER = ModelTokenizer.load(model_info())
CALL = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
ADDING = "{% for m in messages %}<{{ m['role'] + ':' + m['content'] }}>{% endfor %}"
PRINTING = "{% for m in messages %}<{{ m.role }}:{{ m.content | trim }}>{% endfor %}"
COUNTING = """{% for m in messages %}
{%- if 'tool_calls' in m and m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif -%}
<{{ m.role }}:{{ m.content }}>
{%- endfor %}"""


@pytest.mark.parametrize("template", [ADDING, PRINTING, COUNTING])
@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {"content": []}, {}])
def test_a_message_without_content_has_an_empty_text(template, content):
    """As an agent sends the model's own calls back."""
    messages = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", **content, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "Noon."},
    ]
    tokenizer = replace(TOKENIZER, template=environment().from_string(template))
    assert tokenizer.render(ChatPrompt(parse_messages(messages))) == "<user:When?><assistant:><tool:Noon.>"


@pytest.mark.parametrize("calls", [None, []])
def test_no_calls_are_an_absent_field(calls):
    message = {"role": "assistant", "content": "Noon.", "tool_calls": calls}
    assert parse_messages([message]) == [{"role": "assistant", "content": "Noon."}]


PARTS = [
    "a",
    {"type": "text", "text": "b"},
    {"type": "input_text", "text": "c"},
    {"type": "output_text", "text": "d", "annotations": []},
    {"type": "refusal", "refusal": "e"},
    {"type": "thinking", "thinking": "f"},
]


def test_all_parts_that_are_text_are_joined():
    """As in vLLM."""
    assert parse_messages([{"role": "user", "content": PARTS}]) == [{"role": "user", "content": "a\nb\nc\nd\ne\nf"}]
    assert messages_of([{"role": "user", "content": PARTS}]) == [{"role": "user", "content": "a\nb\nc\nd\ne\nf"}]


@pytest.mark.parametrize(
    "part",
    [5, None, {}, {"text": "a"}, {"type": []},
     {"type": "image_url", "image_url": {"url": "data:,"}}],
)  # fmt: skip
def test_other_parts_are_refused(part):
    with pytest.raises(NotServed, match=r"messages\[0\].content: parts of type"):
        parse_messages([{"role": "user", "content": [part]}])
    with pytest.raises(NotServed, match=r"input\[0\].content: parts of type"):
        messages_of([{"role": "user", "content": [part]}])


@pytest.mark.parametrize(("part", "key"), [
    ({"type": "text"}, "text"), ({"type": "text", "text": 5}, "text"), ({"type": "refusal", "text": "a"}, "refusal"),
])  # fmt: skip
def test_a_part_without_its_text_is_refused_by_that_name(part, key):
    for name, parse in (("messages", parse_messages), ("input", messages_of)):
        with pytest.raises(InvalidRequest, match=rf"{name}\[0\]\.content\[1\]\.{key} must be a string"):
            parse([{"role": "user", "content": [{"type": "text", "text": "a"}, part]}])


@pytest.mark.parametrize("content", [5, True, {"type": "text", "text": "a"}])
def test_a_content_of_another_type_is_refused(content):
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content must be"):
        parse_messages([{"role": "user", "content": content}])


@pytest.mark.parametrize("arguments", ['{"city": "Par', " ", "[]", "not JSON", "[" * 5000, None, 7, ["a"]])
def test_a_call_whose_arguments_are_no_object_has_none(arguments):
    """As in vLLM: an answer that was cut off in a call comes back with the conversation."""
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": arguments}}
    (message,) = parse_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"] == {"name": "clock", "arguments": {}}
    item = {"type": "function_call", "call_id": "1", "name": "clock", "arguments": arguments}
    (message,) = messages_of([item])
    assert message["tool_calls"][0]["function"] == {"name": "clock", "arguments": "{}"}
