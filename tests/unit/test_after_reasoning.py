"""Grammars of models that reason: they begin behind the reasoning, by the tokens that mark it."""

from __future__ import annotations

import json

import pytest

from tests.unit.scripts import DEMO, model_info

BEGIN, END = 1736, 1737
"""Behind the demo model's vocabulary."""
CHAT = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Hello"}],
    "response_format": {"type": "json_object"},
    "max_tokens": 4,
}


@pytest.fixture
def reasoner(tmp_path):
    """The facts of a model whose tokenizer has tags of reasoning; `tail` ends its template."""

    def make(tail: str = "", begin: str = "<think>", size: int = 1738):
        tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
        plain = {"special": False, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        tokenizer["added_tokens"] += [
            {"id": token, "content": text, **plain} for token, text in ((BEGIN, begin), (END, "</think>"))
        ]
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
        (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}" + tail)
        return model_info(directory=str(tmp_path), tokenizer_file=str(tmp_path / "tokenizer.json"), vocab_size=size)

    return make


@pytest.mark.parametrize(("tail", "begin", "opened"), [
    ("", BEGIN, False),
    ("<think>", None, True),
    ("<think>\n", None, True),
    ("<think></think>", BEGIN, False),
])  # fmt: skip
async def test_the_grammar_begins_behind_the_reasoning(start, reasoner, tail, begin, opened):
    serving = await start(info=reasoner(tail))
    assert (await serving.post("/v1/chat/completions", CHAT)).status == 200
    grammar = serving.worker.submits[0].params.grammar
    assert (grammar.reasoning_begin, grammar.reasoning_end, grammar.reasoning) == (begin, END, opened)


@pytest.mark.parametrize("options", [{"begin": "<thought>"}, {"size": END}])
async def test_a_model_without_both_tokens_answers_by_its_grammar_at_once(start, reasoner, options):
    serving = await start(info=reasoner(**options))
    assert (await serving.post("/v1/chat/completions", CHAT)).status == 200
    grammar = serving.worker.submits[0].params.grammar
    assert (grammar.reasoning_begin, grammar.reasoning_end, grammar.reasoning) == (None, None, False)


async def test_a_completion_has_no_reasoning(start, reasoner):
    serving = await start(info=reasoner())
    asked = {"model": "demo", "prompt": "Hello", "response_format": {"type": "json_object"}, "max_tokens": 4}
    assert (await serving.post("/v1/completions", asked)).status == 200
    assert serving.worker.submits[0].params.grammar.reasoning_end is None
