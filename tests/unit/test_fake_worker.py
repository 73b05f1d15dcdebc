"""The fake worker: it speaks as an engine does, and in the same order every time."""

from __future__ import annotations


async def test_it_answers_with_the_prompt(serving):
    answer = await serving.post("/v1/completions", {"prompt": "The capital of Spain", "model": "demo"})
    assert answer.status == 200, answer.text
    assert answer.json()["choices"][0]["text"] == "The capital of Spain"
