"""POST /vertex: what an instance asks of the engine."""

from __future__ import annotations

import pytest

MESSAGES = [{"role": "user", "content": "Hello"}]


async def params_of(serving, instance):
    answer = await serving.post("/vertex", {"instances": [instance]})
    assert answer.status == 200, answer.text
    return serving.worker.submits[-1].params


async def test_a_conversation_has_the_fields_of_a_chat(serving):
    fields = {"temperature": 0.5, "top_p": 0.8, "max_tokens": 7, "seed": 3, "stop": "never", "frequency_penalty": 0.25}
    params = await params_of(serving, {"messages": MESSAGES, **fields})
    assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.5, 0.8, 7, 3)
    assert params.relative_frequency_penalty == 0.25
    assert (await params_of(serving, {"messages": MESSAGES, "temperature": 0})).temperature == 0
    assert (await params_of(serving, {"messages": MESSAGES})).temperature == 1
    assert (await params_of(serving, {"messages": MESSAGES, "max_completion_tokens": 5})).max_tokens == 5


async def test_a_stop_text_ends_a_conversation(serving):
    answer = await serving.post("/vertex", {"instances": [{"messages": MESSAGES, "stop": ["Hello"]}]})
    (text,) = answer.json()["predictions"]
    assert text.endswith("Hello")


async def test_an_input_has_two_parameters(serving):
    """As in the router, which ignores the others."""
    parameters = {"max_new_tokens": 7, "seed": 3, "temperature": 0.5, "stop": ["a"] * 9}
    params = await params_of(serving, {"inputs": "The capital", "parameters": parameters})
    assert (params.temperature, params.max_tokens, params.seed) == (1, 7, 3)


@pytest.mark.parametrize(("instance", "error"), [
    ({"inputs": "a", "parameters": {"max_new_tokens": 0}}, "`max_new_tokens` must be strictly positive"),
    ({"messages": MESSAGES, "max_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ({"messages": MESSAGES, "max_tokens": -1}, "max_new_tokens"),
    ({"messages": MESSAGES, "top_p": 2}, "`top_p` must be"),
    ({"messages": MESSAGES, "temperature": "hot"}, "temperature"),
    ({"messages": MESSAGES, "tools": [{}]}, "`tools` are not supported"),
    ({"messages": MESSAGES, "response_format": {"type": "json", "value": {}}}, "grammar is not valid"),
])  # fmt: skip
async def test_refusals(serving, instance, error):
    answer = await serving.post("/vertex", {"instances": [instance]})
    assert answer.status == 422
    assert error in answer.json()["error"]
    assert serving.worker.submits == []
