"""Answers that may call tools and else have a format: what the grammar allows in each family's way of writing calls."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from engine.grammar.source import source
from inference.chat.answer_parser import AnswerParser
from inference.chat.call_grammar import with_calls
from inference.generation import structured
from inference.workers.tokenizer import ModelTokenizer
from tests.conftest import DEMO
from tests.unit.scripts import model_info

ANSWER = {
    "type": "object",
    "properties": {"answer": {"enum": ["sunny", "rainy"]}},
    "required": ["answer"],
    "additionalProperties": False,
}
TOWN = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": TOWN}},
    {"type": "function", "function": {"name": "clock"}},
]
WEATHER, CLOCK = ("weather", {"town": "Oslo"}), ("clock", {})
MARKS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"]


@pytest.fixture(params=["tokens", "special", "characters"])
def tokenizer(request, tmp_path):
    """Its marks are tokens, special tokens, or only written in characters."""
    text = (DEMO / "tokenizer.json").read_text()
    made = Tokenizer.from_str(text)
    if request.param == "special":
        made.add_special_tokens(MARKS)
    elif request.param == "tokens":
        made.add_tokens(MARKS)
    made.save(str(tmp_path / "tokenizer.json"))
    loaded = ModelTokenizer.load(model_info(tokenizer_file=str(tmp_path / "tokenizer.json")))
    return loaded, LLTokenizer((tmp_path / "tokenizer.json").read_text(), eos_token=2)


def written(style: str, *calls: tuple[str, dict]) -> str:
    """The calls as models of this style write them."""
    if style == "hermes":
        return "\n".join(f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)
    if style == "llama3":
        return "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls)
    if style == "python_tag":
        return "<|python_tag|>" + written("llama3", *calls)
    if style == "mistral":
        return "[TOOL_CALLS]" + json.dumps([{"name": n, "arguments": a} for n, a in calls])
    return "".join(f"[TOOL_CALLS]{n}[ARGS]{json.dumps(a)}" for n, a in calls)


STYLES = {
    "hermes": "hermes",
    "llama3": "llama3",
    "python_tag": "llama3",
    "mistral": "mistral",
    "mistral_args": "mistral",
}


ANY_OBJECT = structured.json_object("f")
FORMS = {
    '{"answer": "sunny"}': [structured.json_schema(ANSWER, "f"), ANY_OBJECT],
    "sunny": [structured.choice(["sunny", "rainy"], "f"), structured.regex("sunny|rainy", "f")],
}


@pytest.mark.parametrize(("answer", "form"), [(answer, form) for answer, forms in FORMS.items() for form in forms])
@pytest.mark.parametrize("name", STYLES)
def test_a_call_or_the_format(tokenizer, name, answer, form):
    loaded, vocabulary = tokenizer
    loaded.tool_style = STYLES[name]
    if name == "python_tag" and loaded.fast.token_to_id("<|python_tag|>") is None:
        pytest.skip("a family without the tag's token does not write it")

    def allowed(text: str, parallel: bool = True) -> bool:
        grammar = with_calls(form, TOOLS, "auto", parallel, loaded).grammar
        matcher = LLMatcher(vocabulary, source(grammar.kind, grammar.text))
        assert not matcher.get_error()
        ids = loaded.fast.encode(text, add_special_tokens=False).ids
        for position, token in enumerate(ids):
            if not matcher.validate_tokens([token]):
                return False
            assert matcher.consume_token(token), position
        return matcher.is_accepting()

    assert allowed(answer)
    for calls in ((WEATHER,), (CLOCK,), (WEATHER, CLOCK), (CLOCK, WEATHER, WEATHER)):
        text = written(name, *calls)
        assert allowed(text), text
        assert allowed(text, parallel=False) is (len(calls) == 1), text
        parser = AnswerParser(loaded, [], TOOLS, "auto", whole=True)
        added = parser.feed(text, True)
        assert [(call.name, json.loads(call.arguments)) for call in added.calls] == list(calls)
        assert not added.content.strip()
    # An object is a format of its own.
    assert not allowed(written(name, ("unknown", {}))) or (STYLES[name] == "llama3" and form == ANY_OBJECT)
    assert not allowed("It is sunny.")
    assert not allowed(written(name, WEATHER) + " It is sunny.")


@pytest.mark.parametrize("choice", ["none", "required", {"type": "function", "function": {"name": "clock"}}])
def test_other_choices_keep_their_grammar(tokenizer, choice):
    form = structured.json_schema(ANSWER, "f")
    assert with_calls(form, TOOLS, choice, True, tokenizer[0]) is form
    assert with_calls(None, TOOLS, "auto", True, tokenizer[0]) is None
    assert with_calls(form, None, None, True, tokenizer[0]) is form


def test_schemas_that_a_grammar_cannot_enforce_are_left_to_the_model(tokenizer):
    strange = {
        "type": "object",
        "properties": {"a": {"type": "string", "contentEncoding": "base64"}},
        "unevaluatedProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": strange}}]
    grammar = with_calls(structured.json_object("f"), tools, "auto", True, tokenizer[0]).grammar
    assert not LLMatcher(tokenizer[1], source(grammar.kind, grammar.text)).get_error()
