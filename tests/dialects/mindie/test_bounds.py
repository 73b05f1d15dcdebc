"""Both sides of each parameter's bounds, on every inference endpoint, with the vendor's texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

INT32, INT64 = 2**31 - 1, 2**63 - 1
PROMPT = "Question: What is the capital of Spain?\nAnswer:"


@dataclass(frozen=True)
class Rule:
    """A parameter: values that are accepted, values that are refused with `text`, and the type that others lack."""

    key: str
    kind: str
    accepted: tuple[Any, ...] = ()
    refused: tuple[Any, ...] = ()
    text: str = ""
    """`{}` is the value as JSON."""
    beside: tuple[tuple[str, Any], ...] = ()
    """Fields without which it is not accepted, or not read."""


def boolean(key: str, **beside: Any) -> Rule:
    return Rule(key, "boolean", (True, False, None), beside=tuple(beside.items()))


def ranged(key: str, kind: str, accepted: tuple[Any, ...], refused: tuple[Any, ...], text: str, **beside: Any) -> Rule:
    return Rule(key, kind, (*accepted, None), refused, text, tuple(beside.items()))


TEMPERATURE = "Parameter temperature must be in (0.0,3.40282e+38], got {}."
POSITIVE_TEMPERATURE = ranged("temperature", "float", (1e-6, 2, 3.4e38), (0, 0.0, -0.1, 3.5e38), TEMPERATURE)
ANY_TEMPERATURE = ranged("temperature", "float", (0, 0.0, 2.5, 3.4e38), (-0.1, -1, 3.5e38), TEMPERATURE)
TOP_K = "Parameter top_k must be in -1 || (0,2147483647], got {}"
POSITIVE_TOP_K = ranged("top_k", "integer", (1, INT32), (0, -1, INT32 + 1), TOP_K)
OPTIONAL_TOP_K = ranged("top_k", "integer", (0, 1, INT32), (-1, INT32 + 1), TOP_K)
SIGNED_TOP_K = ranged("top_k", "integer", (-1, 1, INT32), (0, -2, INT32 + 1), TOP_K)
TOP_P = "Parameter top_p must be in (0.0,1.0], got {}."
OPEN_TOP_P = ranged("top_p", "float", (1e-6, 0.999), (0, 1, 1.0, 1.1, -0.5), TOP_P)
CLOSED_TOP_P = ranged("top_p", "float", (1e-6, 1, 1.0), (0, 0.0, 1.001, -0.5), TOP_P)
TYPICAL_P = ranged("typical_p", "float", (1e-6, 1), (0, 1.1), "Parameter typical_p must be in (0.0,1.0], got {}.")
SEED = ranged("seed", "unsigned", (0, INT64), (INT64 + 1,), f"Parameter seed must be in [0, {INT64}], got {{}}.")
PENALTY = "Parameter 'repetition_penalty' must be in (0.0, {}], got {{}}."
WIDE_PENALTY = ranged(
    "repetition_penalty", "float", (0.01, 3, 3.4e38), (0, -1, 3.5e38), PENALTY.format("3.40282e+38")
)  # fmt: skip
NARROW_PENALTY = ranged("repetition_penalty", "float", (0.01, 2, 2.0), (0, -1, 2.001), PENALTY.format("2"))
FREQUENCY = ranged("frequency_penalty", "float", (-2, 2.0, 0), (-2.1, 2.1),
                   "Parameter frequency_penalty should be in [-2.0, 2.0], got {}.")  # fmt: skip
PRESENCE = ranged("presence_penalty", "float", (-2, 2.0, 0), (-2.1, 2.1),
                  "Parameter presence_penalty not in [-2.0, 2.0], but got {}.")  # fmt: skip
PRIORITY = ranged("priority", "unsigned", (1, 5), (0, 6), "Parameter priority must be in [1,5], got {}.")
TIMEOUT = ranged("timeout", "unsigned", (1, 65535), (0, 65536),
                 "Parameter timeout must be strictly positive and small than 65535 seconds, got {}.")  # fmt: skip
LENGTH = ranged("max_new_tokens", "integer", (1, 3), (0, -1, INT32 + 1),
                "Parameter max_new_tokens must be in (0,2147483647], got {}.")  # fmt: skip
BATCH = ranged("batch_size", "integer", (1, INT32), (0, -1, INT32 + 1),
               "Parameter batch_size must be in (0,2147483647], got {}.")  # fmt: skip
TRUNCATE = ranged("truncate", "integer", (1, INT32), (0, -1, INT32 + 1), "truncate must be in (0,2147483647], got {}.")
BEST_OF = ranged("best_of", "unsigned", (1, 2), (0, 129), "Parameter [best_of] should be in [1, 128], got {}.",
                 temperature=1)  # fmt: skip
N = ranged("n", "unsigned", (1, 2), (0, 8193), "Parameter [n] should be in [1, 8192], got {}. ", temperature=1)
ADAPTER = ranged("adapter_id", "string", ("a", "A./-_9", "x" * 256), ("", "a b", "x" * 257, "é"),
                 "The format of adapter_id is invalid.")  # fmt: skip

SAMPLED = (boolean("do_sample"), SEED, WIDE_PENALTY, boolean("watermark"))
TGI = (POSITIVE_TEMPERATURE, POSITIVE_TOP_K, OPEN_TOP_P, TYPICAL_P, *SAMPLED, ADAPTER, LENGTH, boolean("details"),
       boolean("return_full_text"), TRUNCATE)  # fmt: skip
NATIVE = (
    POSITIVE_TEMPERATURE,
    POSITIVE_TOP_K,
    OPEN_TOP_P,
    TYPICAL_P,
    *SAMPLED,
    PRIORITY,
    LENGTH,
    TIMEOUT,
    boolean("details"),
)
TRITON = (
    POSITIVE_TEMPERATURE,
    OPTIONAL_TOP_K,
    CLOSED_TOP_P,
    *SAMPLED,
    PRIORITY,
    LENGTH,
    boolean("details"),
    BATCH,
    TIMEOUT,
)
VLLM = (boolean("ignore_eos"), boolean("include_stop_str_in_output", stop=["never"]), ANY_TEMPERATURE, SIGNED_TOP_K,
        CLOSED_TOP_P, SEED, FREQUENCY, PRESENCE, boolean("skip_special_tokens"), BEST_OF, N)  # fmt: skip
OPENAI = (*VLLM, NARROW_PENALTY, boolean("use_beam_search"))
LOGPROBS = ranged("logprobs", "unsigned", (0, 5), (6,), "logprobs should be in range [0, 5], got {}.")
TOP_LOGPROBS = ranged("top_logprobs", "unsigned", (0, 20), (21,), "Parameter top logprobs must be in [0, 20], got {}.")
CHAT = [{"role": "user", "content": "Hi"}]
TENSOR = {"name": "input0", "shape": [1, 2], "datatype": "UINT32", "data": [5, 6]}


@dataclass(frozen=True)
class Row:
    path: str
    body: Callable[[dict[str, Any]], dict[str, Any]]
    rules: tuple[Rule, ...]
    length: str = "max_new_tokens"


def nested(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda parameters: {**fields, "parameters": parameters}


def flat(**fields: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda parameters: {**fields, **parameters}


def tensor(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"inputs": [{**TENSOR, "parameters": parameters}], "outputs": [{"name": "output0"}]}


WHOLE_TGI = (*TGI, boolean("decoder_input_details"))
TRITON_TEXT = (*TRITON, TYPICAL_P, boolean("perf_stat"))
ROWS = (
    Row("/generate", nested(inputs=PROMPT), WHOLE_TGI),
    Row("/generate_stream", nested(inputs=PROMPT), TGI),
    Row("/", nested(inputs=PROMPT), WHOLE_TGI),
    Row("/generate", flat(prompt=PROMPT), (*VLLM, WIDE_PENALTY, boolean("stream")), "max_tokens"),
    Row("/v1/chat/completions", flat(model="demo", messages=CHAT),
        (*OPENAI, boolean("logprobs"), TOP_LOGPROBS, boolean("stream")), "max_tokens"),
    Row("/v1/completions", flat(model="demo", prompt=PROMPT), (*OPENAI, LOGPROBS, boolean("stream")), "max_tokens"),
    Row("/infer", nested(inputs=PROMPT), NATIVE),
    Row("/infer_token", nested(input_id=[5, 6]), NATIVE),
    Row("/v2/models/demo/generate", nested(text_input=PROMPT), TRITON_TEXT),
    Row("/v2/models/demo/generate_stream", nested(text_input=PROMPT), TRITON_TEXT),
    Row("/v2/models/demo/infer", tensor, TRITON),
)  # fmt: skip


@pytest.mark.parametrize(
    ("row", "rule"),
    [pytest.param(row, rule, id=f"{row.path}-{rule.key}") for row in ROWS for rule in row.rules],
)
def test_bounds(mindie, row, rule):
    beside = dict(rule.beside)
    for value in rule.accepted:
        parameters = {row.length: 1, **beside, rule.key: value}
        answer = mindie.post(row.path, row.body(parameters))
        assert answer.status_code == 200, (parameters, answer.text)
    for value in rule.refused:
        mindie.refused(row.path, row.body({**beside, rule.key: value}), rule.text.replace("{}", json.dumps(value)))
    strange: list[Any] = [5 if rule.kind in ("boolean", "string") else "5", [], {}]
    if rule.kind != "boolean":
        strange.append(True)
    if rule.kind in ("integer", "unsigned"):
        strange.append(1.0)
    if rule.kind == "unsigned":
        strange.append(-1)
    for value in strange:
        mindie.refused(row.path, row.body({**beside, rule.key: value}), f"{rule.key} must be {rule.kind} type.")


@pytest.mark.live
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.path)
def test_the_engine_takes_what_is_accepted(mindie, row):
    for rule in row.rules:
        for value in rule.accepted:
            parameters = {row.length: 1, **dict(rule.beside), rule.key: value}
            answer = mindie.post(row.path, row.body(parameters))
            assert answer.status_code == 200, (parameters, answer.text)


LONG = "Input validation error: length of `stop` must be in [1, {}], but got {}"
LIST = "Input validation error: `stop` must be list[string] if list, and item length in [1, 1024] with total <= 32768"
KIND = "Input validation error: param stop must be string or list[string]"
SHORT_LISTS = [row for row in ROWS if row.rules in (TGI, WHOLE_TGI)]
LONG_LISTS = [row for row in ROWS if row.length == "max_tokens"]


@pytest.mark.parametrize(
    ("row", "longest", "strings"),
    [pytest.param(row, 1024, 1024, id=row.path) for row in SHORT_LISTS]
    + [pytest.param(row, 32768, 32768, id=row.path) for row in LONG_LISTS],
)
def test_bounds_of_stop(mindie, row, longest, strings):
    for value in ("~" * longest, ["~" * 1024] * 32, ["~"] * strings, ["~" * 1024, "~"], [], None):
        answer = mindie.post(row.path, row.body({row.length: 1, "stop": value}))
        assert answer.status_code == 200, (str(value)[:80], answer.text)
    for value, text in (
        ("", LONG.format(longest, 0)),
        ("~" * (longest + 1), LONG.format(longest, longest + 1)),
        ("\U0001f600" * (longest // 2 + 1), LONG.format(longest, longest + 2)),  # two units each
        (["~"] * (strings + 1), LIST),
        (["~" * 1024] * 32 + ["~"], LIST),
        (["~" * 1025], LIST),
        ([""], LIST),
        ([5], LIST),
        (5, KIND),
        ({}, KIND),
    ):
        mindie.refused(row.path, row.body({"stop": value}), text)


@pytest.mark.parametrize("row", LONG_LISTS, ids=lambda row: row.path)
def test_bounds_of_max_tokens(mindie, row):
    for value in (1, 3):
        assert mindie.post(row.path, row.body({"max_tokens": value})).status_code == 200
    for value in (0, -1, INT32 + 1):
        text = f"Parameter max_tokens must be (0,{INT32}], got {value}"
        mindie.refused(row.path, row.body({"max_tokens": value}), text)
    for value in (1.5, "5", True, []):
        mindie.refused(row.path, row.body({"max_tokens": value}), "Parameter max_tokens not number_integer")


@pytest.mark.live
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.path)
def test_the_longest_output_ends_with_the_context(mindie, row):
    """The largest number is accepted everywhere."""
    answer = mindie.post(row.path, row.body({row.length: INT32}))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("row", [replace(row, rules=()) for row in ROWS], ids=lambda row: row.path)
def test_the_first_invalid_parameter_is_reported(mindie, row):
    """Penalties come after the temperature, lengths after penalties."""
    wrong = {row.length: 0, "repetition_penalty": 0, "temperature": -1}
    mindie.refused(row.path, row.body(wrong), TEMPERATURE.format(-1))
    del wrong["temperature"]
    limit = "2" if row.path.startswith("/v1") else "3.40282e+38"
    mindie.refused(row.path, row.body(wrong), PENALTY.format(limit).format(0))
