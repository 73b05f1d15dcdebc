"""Free text in which triggers start JSON by a schema: what the engine is asked for, and what is refused."""

from __future__ import annotations

import json

import pytest

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"begin": "<weather>", "schema": SCHEMA, "end": "</weather>"}
TAG = {"structures": [WEATHER], "triggers": ["<weath", "<w"]}


def asked(tag):
    return {"messages": [{"role": "user", "content": "Hi"}], "structured_outputs": {"structural_tag": tag}}


@pytest.mark.parametrize("form", [lambda tag: tag, json.dumps])
async def test_the_shortest_trigger_starts_a_structure(serving, form):
    assert (await serving.post("/v1/chat/completions", asked(form(TAG)))).status == 200
    grammar = serving.worker.submits[0].params.grammar
    (structure,) = json.loads(grammar.text)
    assert grammar.kind == "structural_tag"
    assert (structure["trigger"], structure["begin"], structure["end"]) == ("<w", "<weather>", "</weather>")
    assert structure["schema"]["properties"] == SCHEMA["properties"]


@pytest.mark.parametrize(("change", "text"), [
    ({"structures": []}, "needs the lists `structures` and `triggers`"),
    ({"triggers": []}, "needs the lists `structures` and `triggers`"),
    ({"triggers": "<w"}, "needs the lists `structures` and `triggers`"),
    ({"triggers": [""]}, "triggers must be non-empty strings"),
    ({"structures": [{**WEATHER, "begin": "none"}]}, "the structure 'none' begins with none of the triggers"),
    ({"structures": [{**WEATHER, "end": 5}]}, "`begin` and `end` of a structure must be strings"),
    ({"structures": [{**WEATHER, "schema": "x"}]}, "each structure needs a `begin`, a `schema` and an `end`"),
    ({"structures": [WEATHER] * 10_000}, "structures at most"),
])  # fmt: skip
async def test_refused(serving, change, text):
    answer = await serving.post("/v1/chat/completions", asked({**TAG, **change}))
    error = answer.json()["error"]
    assert (answer.status, error["param"]) == (400, "structured_outputs")
    assert error["message"].startswith("structured_outputs: ")
    assert text in error["message"]
    assert not serving.worker.submits
