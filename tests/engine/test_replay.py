"""A sequence whose first tokens came from another worker goes on as if it had got them here."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from engine.adapters.files import content_digest
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.failures import Failure, FailureCode, FinishReason
from engine.messages import AdapterRef
from engine.sampling.params import Grammar
from tests.conftest import DEMO
from tests.engine.engines import Driver, core, prompts

PROMPT = prompts(1700, (40,), seed=3)[0]
PHRASE = prompts(1700, (12,), seed=5)[0]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
TAG = [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>", "trigger": "<f>"}]
TAGGED = TOKENIZER.encode("<f>12</f>", add_special_tokens=False).ids
BEGIN, END = 500, 501
REGEX = Grammar("regex", r"[a-c]{3}-\d{2,4}")
ON = {"ignore_eos": True, "max_tokens": 40}
SAMPLED = {**ON, "temperature": 0.9, "seed": 7}

CASES = {
    "greedy": ON,
    "sampled": SAMPLED,
    "filtered": {**SAMPLED, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "typical": {**SAMPLED, "typical_p": 0.8},
    "repetition": {**SAMPLED, "repetition_penalty": 1.4},
    "presence": {**SAMPLED, "presence_penalty": 1.5},
    "frequency": {**ON, "frequency_penalty": 1.0},
    "relative frequency": {**SAMPLED, "relative_frequency_penalty": 1.0},
    "watermark": {**SAMPLED, "watermark": True},
    "bias": {**SAMPLED, "logit_bias": {PHRASE[0]: 4.0}, "allowed_token_ids": PHRASE},
    "bad words": {**SAMPLED, "allowed_token_ids": PHRASE[:3], "bad_words": [PHRASE[:2], [PHRASE[1], PHRASE[1]]]},
    "logprobs": {**SAMPLED, "logprobs": 3},
    "processed logprobs": {**SAMPLED, "logprobs": 3, "logprobs_mode": "processed", "top_k": 10},
    "minimum": {**SAMPLED, "ignore_eos": False, "min_tokens": 30, "logit_bias": {2: 30.0}},
    "stop token": {**SAMPLED, "allowed_token_ids": PHRASE, "stop_token_ids": [PHRASE[4]], "min_tokens": 5},
    "schema": {"grammar": Grammar("json_schema", json.dumps(SCHEMA)), "max_tokens": 60},
    "sampled schema": {**SAMPLED, "max_tokens": 60, "grammar": Grammar("json_schema", json.dumps(SCHEMA)), "logprobs": 1},
    "regex": {**SAMPLED, "ignore_eos": False, "grammar": REGEX},
    "choice": {"grammar": Grammar("choice", '["a long choice", "a longer choice", "something else"]')},
    "tag": {
        **SAMPLED, "grammar": Grammar("structural_tag", json.dumps(TAG)), "allowed_token_ids": TAGGED, "temperature": 1000.0, "seed": 2,
        "max_tokens": 120,
    },
    "reasoning begun": {**SAMPLED, "grammar": Grammar("regex", "[0-9]{3}x", None, END, True), "logit_bias": {END: 9.0}},
    "reasoning": {**SAMPLED, "grammar": Grammar("regex", "[0-9]{3}x", BEGIN, END), "logit_bias": {BEGIN: 12.0, END: 9.0}},
}  # fmt: skip


@pytest.fixture(scope="module")
def first():
    return Driver(core(DEMO, max_model_len=256))


@pytest.fixture(scope="module")
def second():
    """Another worker: other chunks, and a cache of its own; with draft tokens."""
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 16, "speculative_tokens": 6}
    return Driver(core(DEMO, max_model_len=256, **options))


def run(driver: Driver, prompt: list[int] = PROMPT, **asked: object):
    """Tokens, their log-probabilities, and the last output."""
    driver.outputs.clear()
    assert driver.submit(0, prompt, **asked) is None
    driver.run()
    outputs = driver.outputs[0]
    logprobs = [(e.token_id, e.logprob, e.rank, e.top) for o in outputs for e in o.logprobs or []]
    return driver.tokens(0), logprobs, outputs[-1]


@pytest.mark.parametrize("name", CASES)
def test_the_rest_is_that_of_an_undisturbed_run(first, second, name):
    tokens, logprobs, end = run(first, **CASES[name])
    assert end.finish_reason in ("stop", "length"), end
    assert len(tokens) >= 3, tokens
    for kept in sorted({1, 2, len(tokens) // 2, len(tokens) - 1}):
        rest, rest_logprobs, last = run(second, generated=tokens[:kept], **CASES[name])
        assert rest == tokens[kept:], kept
        assert rest_logprobs == logprobs[kept if logprobs else 0 :]
        assert (last.finish_reason, last.stop_token_id) == (end.finish_reason, end.stop_token_id)
    if name == "tag":  # so hot that the seed alone decides
        assert "<f>" in TOKENIZER.decode(tokens), "the tag was not opened"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_many_replayed_together_beside_new_ones(dtype):
    """All start at one moment, in few blocks, so that some are preempted after their replay."""
    options = {"model": str(DEMO), "dtype": dtype, "max_model_len": 256}
    alone = Driver(EngineCore(EngineConfig(**options)))
    asked = prompts(1700, tuple(range(20, 28)), seed=4)
    whole = [run(alone, prompt, **SAMPLED)[0] for prompt in asked]
    crowd = Driver(
        EngineCore(EngineConfig(**options, kv_cache_bytes=64 << 20, max_num_seqs=16, max_num_batched_tokens=32))
    )
    for i, prompt in enumerate(asked):
        crowd.submit(i, prompt, generated=whole[i][: 5 * i], **SAMPLED)
    crowd.run()
    assert [whole[i][: 5 * i] + crowd.tokens(i) for i in range(len(asked))] == whole


def test_a_repeating_text_with_draft_tokens(first, second):
    asked = {"max_tokens": 60, "ignore_eos": True, "logit_bias": {PHRASE[0]: 100.0}}
    tokens, *_ = run(first, PHRASE * 4, **asked)
    steps = second.engine.stats.steps
    rest, *_ = run(second, PHRASE * 4, generated=tokens[:20], **asked)
    assert rest == tokens[20:]
    assert second.engine.stats.steps - steps < 40


def test_with_an_adapter(first, second):
    folder = DEMO.parent / "demo-adapters" / "pirate"
    adapter = AdapterRef(content_digest(folder), str(folder))
    plain, *_ = run(first, **ON)
    tokens, *_ = run(first, adapter=adapter, **ON)
    assert tokens != plain
    assert run(second, adapter=adapter, generated=tokens[:9], **ON)[0] == tokens[9:]


def test_only_what_is_new_is_published(first, second):
    asked = {**ON, "prompt_logprobs": 1, "logprobs": 0}
    tokens, *_ = run(first, **asked)
    before = second.engine.stats.prompt_tokens
    run(second, generated=tokens[:4], **asked)
    outputs = second.outputs[0]
    assert all(o.prompt_logprobs is None and o.cached_tokens is None and o.queue_s is None for o in outputs)
    assert second.engine.stats.prompt_tokens == before
    run(second, **asked)
    assert sum(len(o.prompt_logprobs or []) for o in second.outputs[0]) == len(PROMPT) - 1


def test_a_full_queue_takes_replays():
    driver = Driver(core(DEMO, max_model_len=256, max_waiting_requests=1))
    assert driver.submit(0, PROMPT) is None
    assert driver.submit(1, PROMPT).error == Failure(FailureCode.OVERLOADED)
    assert driver.submit(2, PROMPT, generated=[5]) is None
    driver.run()


def test_replays_go_before_requests_that_came_after_them():
    driver = Driver(core(DEMO, max_model_len=256, max_num_seqs=1))
    driver.submit(0, PROMPT, **ON)
    driver.step()
    driver.submit(1, PROMPT, **ON)
    driver.submit(2, PROMPT, generated=[5], **ON)
    driver.submit(3, PROMPT, generated=[5], age_s=60.0, **ON)
    driver.run()
    assert list(driver.outputs) == [0, 3, 1, 2]


@pytest.mark.parametrize(
    ("generated", "failure"),
    [
        ([1, 99999], Failure(FailureCode.OUT_OF_VOCABULARY, {"highest": 1735})),
        ([-1], Failure(FailureCode.OUT_OF_VOCABULARY, {"highest": 1735})),
        ([5] * 16, Failure(FailureCode.NOTHING_LEFT, {"tokens": 16, "limit": 16})),
        ([5] * 17, Failure(FailureCode.NOTHING_LEFT, {"tokens": 17, "limit": 16})),
    ],
)
def test_impossible_tokens_are_refused(first, generated, failure):
    assert first.submit(0, PROMPT, generated=generated).error == failure
    assert first.submit(0, [], generated=[5]).error == Failure(FailureCode.EMPTY_PROMPT)
    assert not first.engine.has_work


@pytest.mark.parametrize("text", ["xyz", "abcd", "abc-12345", "abc-1234"])
def test_tokens_that_the_grammar_does_not_accept(first, text):
    """The last one is the whole text: nothing is left to generate."""
    generated = TOKENIZER.encode(text, add_special_tokens=False).ids
    *_, last = run(first, grammar=REGEX, generated=[*generated, 2] if text == "abc-1234" else generated)
    assert (last.finish_reason, last.error.code, last.token_ids) == ("error", FailureCode.GRAMMAR, [])
    _, _, last = run(first, grammar=REGEX)
    assert last.finish_reason == FinishReason.STOP


def test_a_grammar_that_is_compiled_while_the_tokens_wait(first, second, monkeypatch):
    """The limit of a mask counts from the end of the compilation."""
    monkeypatch.setattr("engine.grammar.processes.MASK_S", 1.0)
    grammar = Grammar("regex", r"[a-c]{4}-\d{2,4}")
    tokens, *_ = run(first, grammar=grammar)
    second.outputs.clear()
    second.submit(0, PROMPT, grammar=grammar, generated=tokens[:2])
    (process,) = [p for p in second.engine.grammars._known.values() if p.users]
    process.waiting_since -= 100.0
    second.run()
    assert second.tokens(0) == tokens[2:]


def test_handing_over_ends_every_request_as_moved(first, second):
    """Waiting, in prefill, in decode, with a grammar; what was published and the rest are the whole text."""
    small = Driver(core(DEMO, max_model_len=256, max_num_seqs=3, max_num_batched_tokens=48))
    asked = [*prompts(1700, (40, 41, 42, 43), seed=8), PROMPT]
    params = [SAMPLED, SAMPLED, {**ON, "logprobs": 1}, ON, CASES["schema"]]
    whole = [run(first, prompt, **p)[0] for prompt, p in zip(asked, params, strict=True)]
    for i in (4, 0, 1, 2, 3):
        small.submit(i, asked[i], **params[i])
    for _ in range(8):
        small.step()
    small.engine.hand_over()
    small.run()
    assert {small.finish_reason(i) for i in range(5)} == {FinishReason.MOVED}
    counts = [len(small.tokens(i)) for i in range(5)]
    assert 0 in counts
    assert max(counts) > 3
    for i in range(5):
        rest, *_ = run(second, asked[i], generated=small.tokens(i), **params[i])
        assert small.tokens(i) + rest == whole[i]
