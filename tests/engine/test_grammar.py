"""Output that follows a grammar, whatever the model would rather say; and grammars that fail their request alone."""

from __future__ import annotations

import json
import re

import pytest
from tokenizers import Tokenizer

from engine.failures import FailureCode, words
from engine.sampling.params import Grammar
from inference.generation.structured import structural_tag
from tests.conftest import DEMO
from tests.engine.engines import Driver, core, prompts
from tests.grammars import admits
from tests.models.random_models import make_model

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMARS = {
    "schema": Grammar("json_schema", json.dumps(SCHEMA)),
    "regex": Grammar("regex", r"[a-c]{3}-\d{2,4}"),
    "choice": Grammar("choice", '["blue", "dark \\"red\\"", "green"]'),
    "lark": Grammar("grammar", 'start: "<" WORD ">"\nWORD: /[a-z]{2,5}/'),
    "gbnf": Grammar("grammar", 'root ::= "yes" | "no" digit\ndigit ::= [0-9]'),
}


def follows(name: str, text: str) -> bool:
    if name == "schema":
        value = json.loads(text)
        return set(value) == {"name", "age"} and len(value["name"]) <= 8 and 0 <= value["age"] <= 99
    patterns = {
        "regex": r"[a-c]{3}-\d{2,4}", "choice": r'blue|dark "red"|green', "lark": r"<[a-z]{2,5}>", "gbnf": r"yes|no[0-9]",
    }  # fmt: skip
    return re.fullmatch(patterns[name], text) is not None


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def test_all_kinds_in_one_batch_beside_free_text(tokenizer):
    """Greedy and sampled, in chunks and with preemption; what is free stays as it is alone."""
    driver = Driver(core(DEMO, max_num_batched_tokens=16, max_num_seqs=16, kv_cache_bytes=64 << 20, max_model_len=256))
    names = [*GRAMMARS] * 2 + ["free"]
    asked = prompts(1700, (40,) * len(names))
    for i, name in enumerate(names):
        sampled = {"temperature": 1.5, "seed": i} if i >= len(GRAMMARS) and name != "free" else {}
        driver.submit(i, asked[i], max_tokens=100, grammar=GRAMMARS.get(name), **sampled)
    driver.run()
    for i, name in enumerate(names):
        text = tokenizer.decode(driver.tokens(i), skip_special_tokens=True)
        assert driver.finish_reason(i) == "stop" or name == "free"
        assert name == "free" or follows(name, text), (name, text)
    alone = Driver(core(DEMO, max_model_len=256))
    alone.submit(0, asked[-1], max_tokens=100)
    alone.run()
    assert alone.tokens(0) == driver.tokens(len(names) - 1)


def test_the_end_token_is_marked_only_where_it_was_chosen(tokenizer):
    driver = Driver(core(DEMO, max_model_len=256))
    driver.submit(0, prompts(1700, (9,))[0], max_tokens=20, grammar=Grammar("choice", '["ab", "ac"]'))
    driver.run()
    last = driver.outputs[0][-1]
    assert last.finish_reason == "stop"
    ended = last.stop_token_id is not None
    kept = driver.tokens(0)[:-1] if ended else driver.tokens(0)
    assert tokenizer.decode(kept) in ("ab", "ac")


@pytest.mark.parametrize(
    "bad",
    [
        Grammar("regex", "["),
        Grammar("json_schema", '{"type": "nonsense"}'),
        Grammar("grammar", "start: nothing"),
        Grammar("grammar", "root ::= ("),
        Grammar("json_schema", "[" * 100000),
        Grammar("choice", "5"),
        Grammar("json_schema", '{"$ref": "#"}'),
        Grammar("grammar", "start: start start"),
    ],
)
def test_a_bad_grammar_fails_its_request_alone(bad):
    driver = Driver(core(DEMO, max_model_len=256))
    first, second = prompts(1700, (9, 9))
    driver.submit(0, first, max_tokens=5, grammar=bad)
    driver.submit(1, second, max_tokens=5, ignore_eos=True)
    driver.run()
    assert driver.finish_reason(0) == "error"
    failure = driver.outputs[0][-1].error
    assert failure.code is FailureCode.GRAMMAR
    assert not any(inner in words(failure) for inner in ("<state>", "Parser", "NoExtension", "lexer"))
    assert len(driver.tokens(1)) == 5


def test_a_request_that_allows_nothing_ends_alone():
    """The grammar wants digits and the client forbids them: an error for this request, and nothing else happens."""
    driver = Driver(core(DEMO, max_model_len=256))
    first, second = prompts(1700, (9, 9))
    for temperature in (0.0, 1.0):
        driver.submit(
            0, first, max_tokens=9, temperature=temperature, allowed_token_ids=[5], grammar=Grammar("regex", "[0-9]+")
        )
        driver.submit(1, second, max_tokens=9, ignore_eos=True)
        driver.run()
        assert driver.finish_reason(0) == "error"
        assert driver.outputs.pop(0)[-1].error.code is FailureCode.GRAMMAR
        assert len(driver.tokens(1)) == 9
        del driver.outputs[1]


def test_a_model_with_fewer_tokens_than_its_tokenizer(models_dir):
    """The tiny models have 400 logits and the demo model's tokenizer."""
    driver = Driver(core(make_model(models_dir, "llama"), max_model_len=128))
    driver.submit(0, prompts(400, (9,))[0], max_tokens=30, grammar=Grammar("regex", "[0-9]{3}"))
    driver.run()
    assert driver.finish_reason(0) == "stop"
    assert max(driver.tokens(0)) < 400


@pytest.mark.parametrize("begun", [True, False])
def test_thoughts_are_free_and_what_follows_them_is_not(tokenizer, begun):
    """Tokens 500 and 501 stand for the marks; the first is given by the prompt or chosen, the second is chosen."""
    begin, end = 500, 501
    grammar = Grammar("regex", "[0-9]{3}x", None if begun else begin, end, begun)
    driver = Driver(core(DEMO, max_model_len=256))
    prompt = prompts(1700, (9,))[0]
    # The more often the mark of the beginning has come, the less it is favoured, until the other one is.
    thinking = {"logit_bias": {begin: 80.0, end: 50.0}, "frequency_penalty": 2.0}
    driver.submit(0, prompt, max_tokens=60, grammar=grammar, ignore_eos=False, **thinking)
    driver.submit(1, prompt, max_tokens=60, grammar=grammar, logit_bias={begin: -100.0})
    driver.run()
    tokens = driver.tokens(0)
    assert driver.finish_reason(0) == "stop"
    assert begun or tokens[0] == begin
    answer = tokens[tokens.index(end) + 1 :]
    assert re.fullmatch("[0-9]{3}x", tokenizer.decode(answer, skip_special_tokens=True))
    if not begun:  # a model that does not think answers at once
        assert re.fullmatch("[0-9]{3}x", tokenizer.decode(driver.tokens(1), skip_special_tokens=True))


def test_marks_of_thoughts_that_the_model_does_not_have_fail_their_request_alone():
    driver = Driver(core(DEMO, max_model_len=256))
    driver.submit(0, [5, 6], grammar=Grammar("regex", "a", 10**6, 10**6 + 1, False))
    driver.submit(1, [5, 6], max_tokens=3, ignore_eos=True)
    driver.run()
    assert words(driver.outputs[0][-1].error) == "grammar: the model has no tokens for thoughts"
    assert len(driver.tokens(1)) == 3


def test_text_with_tags_follows_their_schemas(tokenizer):
    tag = {"trigger": "<", "begin": "<f=a>", "schema": {"enum": [1, 22]}, "end": "</f>"}
    driver = Driver(core(DEMO, max_model_len=256))
    driver.submit(
        0, prompts(1700, (9,))[0], max_tokens=12, grammar=Grammar("structural_tag", json.dumps([tag])),
        logit_bias={tokenizer.token_to_id("<"): 100.0},
    )  # fmt: skip
    driver.run()
    assert re.search(r"<f=a>(1|22)</f>", tokenizer.decode(driver.tokens(0))), tokenizer.decode(driver.tokens(0))


@pytest.mark.parametrize(
    ("text", "admitted", "refused"),
    [
        (r'root ::= "\u0041bc"', "Abc", "\u41bc"),
        (r'root ::= "\u00e9\U0001F600"', "\u00e9\U0001f600", "e"),
        (r"root ::= [^\u0000-\u001f]", "x", "\n"),
        (r'root ::= "\\u0041"', "\\u0041", "A"),
        ('start: "::=" /[a-z]+/', "::=abc", "abc"),
    ],
)
def test_characters_of_grammars(text, admitted, refused):
    assert admits(Grammar("grammar", text), admitted)
    assert not admits(Grammar("grammar", text), refused)


def test_structures_have_as_little_white_space_as_schemas():
    tag = structural_tag(
        {"triggers": ["<f", "<"], "structures": [
            {"begin": "<f>", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}, "end": "</f>"},
            {"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"},
        ]}, "tag",
    ).grammar  # fmt: skip
    assert admits(tag, '<f>{"a": 1}</f> and <a>5</a>')
    assert not admits(tag, '<f>{"a":' + "\n" * 31 + "1}</f>")
