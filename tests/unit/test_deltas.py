"""Deltas of a sequence, joined and taken apart."""

from __future__ import annotations

import pytest

from engine.failures import FinishReason
from engine.messages import TokenLogprob
from inference.generation.deltas import Delta, by_token, joined
from inference.generation.ending import EndCause


def scored(*tokens: int) -> list[TokenLogprob]:
    return [TokenLogprob(token, -float(token), 1, []) for token in tokens]


LAST = Delta(
    1,
    "c d",
    [3, 4],
    scored(3, 4),
    ["c", " d"],
    FinishReason.STOP,
    "d",
    ended_by_eos=True,
    cause=EndCause.STOP_STRING,
    prompt=2,
)


def test_joined_deltas_are_one_with_the_last_ones_end():
    first = Delta(1, "a b", [1, 2], scored(1, 2), ["a", " b"], prompt=2)
    whole = joined([first, LAST])
    assert (whole.text, whole.token_ids, whole.token_texts) == ("a bc d", [1, 2, 3, 4], ["a", " b", "c", " d"])
    assert [entry.token_id for entry in whole.logprobs or []] == [1, 2, 3, 4]
    assert (whole.index, whole.prompt, whole.finish_reason, whole.stop_reason) == (1, 2, FinishReason.STOP, "d")
    assert (whole.ended_by_eos, whole.cause) == (True, EndCause.STOP_STRING)


def test_without_log_probabilities_there_are_none():
    assert joined([Delta(0, "a", [1]), Delta(0, "b", [2])]).logprobs is None


def test_each_token_by_itself_and_the_end_with_the_last():
    one, two = by_token(LAST)
    assert (one.text, one.token_ids, one.token_texts, one.index, one.prompt) == ("c", [3], ["c"], 1, 2)
    assert (two.text, two.token_ids, two.token_texts, two.index, two.prompt) == (" d", [4], [" d"], 1, 2)
    assert ([e.token_id for e in one.logprobs or []], [e.token_id for e in two.logprobs or []]) == ([3], [4])
    assert (one.finish_reason, one.stop_reason, one.cause, one.ended_by_eos) == (None, None, None, False)
    assert (two.finish_reason, two.stop_reason, two.cause, two.ended_by_eos) == (
        FinishReason.STOP, "d", EndCause.STOP_STRING, True,
    )  # fmt: skip


def test_an_end_token_without_a_text_is_a_delta_of_its_own():
    parts = by_token(Delta(0, "ab", [1, 2, 9], None, ["a", "b"]))
    assert [(part.text, part.token_ids, part.token_texts) for part in parts] == [
        ("a", [1], ["a"]),
        ("b", [2], ["b"]),
        ("", [9], []),
    ]
    assert [part.logprobs for part in parts] == [None] * 3


@pytest.mark.parametrize("delta", [
    Delta(0, "a", [1], None, ["a"]), Delta(0, "", [1, 2], None, ["a", "b"]), Delta(0, "xab", [1, 2], None, ["a", "b"]),
    Delta(0, "abc", [1, 2], None, ["a", "b", "c"]),
])  # fmt: skip
def test_what_is_no_sum_of_its_tokens_stays_whole(delta):
    assert by_token(delta) == [delta]
