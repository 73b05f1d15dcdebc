"""Log-probabilities of prompts in completions: rendered once for all choices, in a thread, and no more than the limit."""

from __future__ import annotations

import threading

import pytest

from inference.services import Limits
from inference.vendors.openai_logprobs import LogprobTexts
from tests.unit.scripts import says

TEXT = "/v1/completions"
ASK = {"model": "demo", "prompt": list(range(5, 405)), "n": 4, "max_tokens": 1, "temperature": 1}


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 3}, {"echo": True, "logprobs": 3, "stream": True}])
async def test_a_prompt_is_rendered_once_for_all_choices(serving, monkeypatch, fields):
    rendered, render = [], LogprobTexts.text
    ranked = LogprobTexts._ranked
    monkeypatch.setattr(LogprobTexts, "text", lambda self, *of: rendered.append(of) or render(self, *of))
    monkeypatch.setattr(LogprobTexts, "_ranked", lambda self, *of: rendered.append(of) or ranked(self, *of))
    serving.worker.default = says("a")
    answer = await serving.post(TEXT, {**ASK, **fields})
    assert answer.status == 200, answer.text
    assert 400 <= len(rendered) <= 400 * 5 + 4 * 5


@pytest.mark.parametrize("stream", [False, True])
async def test_every_choice_has_the_prompts(serving, stream):
    serving.worker.default = says("a")
    answer = await serving.post(TEXT, {**ASK, "echo": True, "logprobs": 2, "stream": stream})
    events = answer.events[:-1] if stream else [answer.json()]
    firsts = {}
    for choice in [choice for event in events for choice in event["choices"]]:
        firsts.setdefault(choice["index"], choice["logprobs"])
    assert sorted(firsts) == [0, 1, 2, 3]
    one = firsts[0]
    assert {len(values) for values in one.values()} == {401}
    assert one["text_offset"] == [sum(map(len, one["tokens"][:i])) for i in range(401)]
    assert one["top_logprobs"][0] is None
    assert all(first == one for first in firsts.values())


async def test_a_streams_long_prompt_is_rendered_in_a_thread(serving, monkeypatch):
    threads, render = [], LogprobTexts.lists

    def lists(self, entries, offset, context):
        if len(entries) > 100:
            threads.append(threading.current_thread())
        return render(self, entries, offset, context)

    monkeypatch.setattr(LogprobTexts, "lists", lists)
    await serving.post(TEXT, {**ASK, "prompt": ASK["prompt"] * 4, "echo": True, "logprobs": 2, "stream": True})
    (thread,) = threads
    assert thread is not threading.main_thread()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 2}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 2}, "logprobs"),
        ({"echo": True, "logprobs": 2, "stream": True}, "logprobs"),
    ],
)
async def test_too_many_are_refused_before_anything_is_computed(start, fields, param):
    serving = await start(limits=Limits(max_prompt_entries=400 * 4 * 3 - 1))
    answer = await serving.post(TEXT, {**ASK, **fields})
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)
    assert not serving.worker.submits
    answer = await serving.post(TEXT, {**ASK, **fields, "n": 1})
    assert answer.status == 200, answer.text
