"""Chat templates: what a client can put into one, and what one that an operator was given can do."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time

import jinja2
import psutil
import pytest

from inference.chat.chat_template import of_model
from inference.errors import TemplateError
from inference.generation.requests import ChatPrompt
from inference.workers.tokenizer import ModelTokenizer
from tests.unit.scripts import model_info
from tests.waiting import wait_until

MESSAGES = [{"role": "user", "content": "Hi"}]
ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ ''|attr('__cla' ~ 'ss__') }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '{0.__class__.__mro__}'|format('') }}",
    "{{ ('{0.__class__}'|attr('format'))('') }}",
    "{% set f = '{0.__class__}'.format %}{{ f('') }}",
    "{{ ['{0.__class__}']|map('format', '')|list }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('touch {0}').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].system('touch {0}') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ strftime_now.__code__.co_consts }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ messages.__class__ }}",
    "{{ messages.append({}) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{{ messages[0].pop('content') }}",
    "{{ messages.clear() }}",
    "{{ (messages|map(attribute='__class__')|list)[0].__mro__ }}",
    "{{ [''] | groupby('__class__') }}",
    "{{ namespace().__dict__ }}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as x %}",
    "{% extends '/etc/passwd' %}",
    "{{ range(10 ** 9)|list }}",
    "{{ raise_exception('no') }}",
    "{{ 1 / 0 }}",
    "{{ undefined.attribute }}",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
]
SHOWN = ("class", "__mro__", "subclasses", "root:", "globals", "<module", "co_consts")
"""What an escape that succeeded would show."""


def rendered(template: str, own: bool = False) -> str:
    """What a template makes of the conversation: one of a client of the control plane, or the model's `own`."""
    tokenizer = ModelTokenizer.load(model_info(), chat_template="" if own else template)
    if own:
        tokenizer.template = of_model(template, {})
    messages = [dict(message) for message in MESSAGES]
    text = tokenizer.render(ChatPrompt(messages))
    assert messages == MESSAGES, "the template changed the conversation"
    return text


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("template", ESCAPES)
def test_no_template_leaves_its_sandbox(template, own, tmp_path):
    touched = tmp_path / "touched"
    text = ""
    with contextlib.suppress(TemplateError, jinja2.TemplateError):
        text = rendered(template.replace("{0}", str(touched)) if "touch" in template else template, own)
    assert not any(mark in text for mark in SHOWN), text
    assert not touched.exists()


@pytest.mark.parametrize("value", [template for template in ESCAPES if "{{" in template])
def test_what_a_client_writes_is_no_template(value):
    """Not in a message, a role, or an argument that the template shows."""
    show = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}{{ more }}"
    tokenizer = ModelTokenizer.load(model_info(), chat_template=show)
    prompt = ChatPrompt([{"role": value, "content": value}], template_arguments={"more": value})
    assert tokenizer.render(prompt) == f"{value}:{value}{value}"


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "macros": "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(60) }}",
    "a large number": "{{ 10 ** (10 ** 8) }}",
    "a long text": "{{ 'a' * 10 ** 10 }}",
    "a wide text": "{{ 'a'|center(10 ** 10) }}",
    "a format": "{{ '%10000000000d'|format(1) }}",
    "a format of its own": "{{ '{:>10000000000}'.format(1) }}",
    "a list that doubles": "{% set n = namespace(x=['a' * 1000]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "texts that grow": "{% set n = namespace(x='a' * 1000) %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
}


@pytest.mark.parametrize("name", ENDLESS)
async def test_one_that_never_ends_costs_its_own_requests_alone(name):
    """While it is rendered and ended others are rendered, by the model's own template and by another deployment's."""
    hostile = ModelTokenizer.load(model_info(), chat_template=ENDLESS[name])
    other = ModelTokenizer.load(model_info(), chat_template="{{ messages[0].content }}!")
    own = ModelTokenizer.load(model_info())
    assert (
        other.render(ChatPrompt(MESSAGES)) == "Hi!"
    )  # its process has started: some attacks end sooner than that takes
    before = most = psutil.Process().memory_info().rss
    begin, turns = time.monotonic(), 0
    attack = asyncio.ensure_future(hostile.encode(ChatPrompt(MESSAGES)))
    while not attack.done():
        assert own.decode(await other.encode(ChatPrompt(MESSAGES))) == "Hi!"
        assert await own.encode(ChatPrompt(MESSAGES))
        turns, most = turns + 1, max(most, psutil.Process().memory_info().rss)
    with pytest.raises(TemplateError, match=r"too long or too much memory|refused the messages"):
        await attack
    print(f"\n{name}: ended after {time.monotonic() - begin:.1f} s, {turns} renderings of others meanwhile")
    assert turns > 1
    assert most - before < 200 << 20
    with pytest.raises(TemplateError):
        await hostile.encode(ChatPrompt(MESSAGES))  # again, in a new process


async def test_a_process_that_is_killed_is_replaced():
    tokenizer = ModelTokenizer.load(model_info(), chat_template="{{ messages[0].content }}!")
    assert tokenizer.render(ChatPrompt(MESSAGES)) == "Hi!"
    tokenizer.template._template._process.kill()
    tokenizer.template._template._process.wait()
    with pytest.raises(TemplateError):
        tokenizer.render(ChatPrompt(MESSAGES))
    assert tokenizer.render(ChatPrompt(MESSAGES)) == "Hi!"


def test_the_process_has_no_secrets_and_ends_with_its_template(monkeypatch):
    monkeypatch.setenv("DRAGOMAN_DATABASE_URL", "postgresql://u:secret@h/d")
    tokenizer = ModelTokenizer.load(model_info(), chat_template="{{ messages[0].content }}!")
    assert tokenizer.render(ChatPrompt(MESSAGES)) == "Hi!"
    process = psutil.Process(tokenizer.template._template._process.pid)
    assert "DRAGOMAN_DATABASE_URL" not in process.environ()
    del tokenizer
    gc.collect()
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


def test_an_error_of_a_template_is_short():
    with pytest.raises(TemplateError) as told:
        rendered("{{ raise_exception('a' * 100000) }}")
    assert len(told.value.message) < 400


def test_a_very_long_text_is_refused():
    with pytest.raises(TemplateError, match="more than 4000000 characters"):
        rendered("{% for i in range(1000) %}{{ 'a' * 10000 }}{% endfor %}")


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"]
)
def test_arguments_with_a_meaning_of_their_own_are_left_out(name):
    from inference.chat.conversation import template_arguments

    assert template_arguments({name: "x", "other": 1}) == {"other": 1}


@pytest.mark.parametrize("field", ["chat_template", "chat_template_kwargs"])
async def test_over_http(serving, field):
    """A template of the request's own is refused, and so are arguments that are no object."""
    body = {"model": "demo", "messages": MESSAGES, "max_tokens": 1, field: "{{ ''.__class__ }}"}
    refused = await serving.post("/v1/chat/completions", body)
    assert refused.status == 400
    assert "class" not in refused.text.replace("chat_template", "")


@pytest.mark.parametrize(
    "name", ["__class__", "self", "loop", "raise_exception", "tokenize", "return_tensors", "a.b", ""]
)
async def test_arguments_of_any_name(serving, name):
    body = {"model": "demo", "messages": MESSAGES, "max_tokens": 1, "chat_template_kwargs": {name: "x"}}
    assert (await serving.post("/v1/chat/completions", body)).status in (200, 400)
