"""The load of a sequence and of a worker, and the expected length of an output."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference.workers.routing.load import (
    DECODE_COST,
    MAX_TENANTS,
    PRIOR_TOKENS,
    ExpectedLengths,
    combined,
    outstanding,
)

counts = st.integers(0, 1 << 20)


def test_prompt_and_rest_of_the_output_count():
    assert outstanding(100, 50, 0, 200) == 100 + DECODE_COST * 50
    assert outstanding(0, 50, 20, 200) == DECODE_COST * 30


def test_an_overdue_sequence_counts_a_quarter_of_what_was_expected_until_its_limit():
    assert outstanding(0, 40, 100, 200) == DECODE_COST * 10
    assert outstanding(0, 40, 195, 200) == DECODE_COST * 5
    assert outstanding(0, 40, 200, 200) == 0


@given(counts, counts, counts, counts)
def test_a_load_falls_as_tokens_come(uncached, expected, produced, max_tokens):
    load = outstanding(uncached, min(expected, max_tokens), produced, max_tokens)
    assert load >= uncached
    assert load >= outstanding(uncached, min(expected, max_tokens), produced + 1, max_tokens)
    assert load <= uncached + DECODE_COST * max_tokens


@given(counts, st.integers(0, 1000), st.floats(0, 1e6))
def test_what_others_hold_is_added_to_the_own_count(own, foreign, mean):
    assert combined(own, 0, mean) == own
    assert combined(own, foreign, mean) >= own
    assert combined(own, foreign + 1, mean) >= combined(own, foreign, mean)


def test_a_new_tenant_is_expected_to_be_usual():
    lengths = ExpectedLengths()
    assert lengths.expect("a", 10_000) == PRIOR_TOKENS
    assert lengths.expect("a", 10) == 10


@given(st.lists(st.integers(0, 5000), min_size=1), st.integers(1, 6000))
def test_an_expected_length_lies_between_those_seen(seen, max_tokens):
    lengths = ExpectedLengths()
    for produced in seen:
        lengths.learn("a", produced)
    assert min(*seen, max_tokens) <= lengths.expect("a", max_tokens) <= min(max(1, *seen), max_tokens)
    assert lengths.expect("another", 6000) == PRIOR_TOKENS


def test_it_follows_a_change():
    lengths = ExpectedLengths()
    for produced in [1000] + [10] * 100:
        lengths.learn("a", produced)
    assert lengths.expect("a", 5000) == 10


def test_tenants_are_forgotten():
    lengths = ExpectedLengths()
    for number in range(MAX_TENANTS + 1):
        lengths.learn(str(number), 7)
    assert lengths.expect("0", 5000) == PRIOR_TOKENS
    assert lengths.expect("1", 5000) == 7
