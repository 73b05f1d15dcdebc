"""The form in which a chat template takes the content of a message."""

from __future__ import annotations

import contextlib

import jinja2
import pytest

from inference.chat.chat_template import PROBE, ChatTemplate, of_model
from inference.chat.guarded_template import GuardedTemplate
from inference.chat.template_process import WRONG

LOOP = "{% for message in messages %}<{{ message.role }}>{% for part in message['content'] %}"
PARTS = LOOP + "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
FIRST = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for line in message['content'] | selectattr('type', 'equalto', 'text') %}{{ line.text }}{% endfor %}"
    "{% endfor %}"
)
TEXTS = "{% for message in messages %}<{{ message.role }}>{{ message['content'] }}{% endfor %}"
BOTH = (
    "{% for message in messages %}<{{ message.role }}>{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)
CONCATENATED = "{% for message in messages %}{{ '<' + message.role + '>' + message.content }}{% endfor %}"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]


@pytest.mark.parametrize(("source", "text"), [
    (PARTS, "<system>Be brief.<user>Why?"),
    (FIRST, "<system>: Be brief.<user>: Why?"),
    (TEXTS, "<system>Be brief.<user>Why?"),
    (BOTH, "<system>Be brief.<user>Why?"),
    (CONCATENATED, "<system>Be brief.<user>Why?"),
])  # fmt: skip
@pytest.mark.parametrize("guarded", [False, True])
def test_contents_are_printed_whatever_form_a_template_takes(source, text, guarded):
    template = ChatTemplate(GuardedTemplate(source), {}) if guarded else of_model(source, {})
    assert template.render({"messages": MESSAGES}) == text
    assert MESSAGES[1]["content"] == "Why?"
    assert template.render({"messages": MESSAGES[1:]}) == text[text.index("<user>") :]


def test_a_template_that_prints_no_content_gets_texts():
    template = of_model("{% for message in messages %}{{ message.content is string }}{% endfor %}", {})
    assert template.render({"messages": MESSAGES}) == "TrueTrue"


@pytest.mark.parametrize("loop", [TEXTS, PARTS])
def test_a_template_that_insists_on_a_system_message(loop):
    template = of_model("{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + loop, {})
    assert template.render({"messages": MESSAGES}) == "<system>Be brief.<user>Why?"
    with pytest.raises(jinja2.TemplateError, match="no system"):
        template.render({"messages": MESSAGES[1:]})


@pytest.mark.parametrize("values", [
    {"bos_token": PROBE},
    {"tools": [{"name": PROBE}]},
    {"tools": [{"name": 5}]},
    {"documents": 5},
])  # fmt: skip
def test_what_the_first_client_sends_decides_for_no_other(values):
    template = of_model(
        "{{ bos_token }}{% for tool in tools %}{{ tool.name + '!' }}{% endfor %}" + PARTS, {"bos_token": "<s>"}
    )
    with contextlib.suppress(*WRONG):
        template.render({"messages": MESSAGES, **values})
    assert template.render({"messages": MESSAGES}) == "<s><system>Be brief.<user>Why?"


def test_a_template_with_an_error_is_none():
    assert of_model("{% if %}", {}) is None
    assert of_model(None, {}) is None
