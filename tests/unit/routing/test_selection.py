"""Which workers may get a request, and which one does."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.workers.routing.demand import Demand
from inference.workers.routing.selection import (
    ADAPTER_TOKENS,
    LOAD_GAP_TOKENS,
    LOAD_RATIO,
    PREFIX_WORTH,
    SESSION_BOUND,
    Candidate,
    choose,
    eligible,
)

DEMAND = Demand(range(1000), 100)


@st.composite
def candidates(draw):
    def one(name):
        return Candidate(
            name,
            load=draw(st.integers(0, 40_000)),
            inflight=draw(st.integers(0, 9)),
            foreign_requests=draw(st.integers(0, 2)),
            matched_tokens=draw(st.integers(0, 1000)),
            has_adapter=draw(st.booleans()),
            takes_adapters=draw(st.booleans()),
            free_blocks=draw(st.none() | st.integers(0, 100)),
            usable=draw(st.booleans()),
            responsive=draw(st.booleans()),
            admitted=draw(st.booleans()),
        )

    return [one(str(number)) for number in range(draw(st.integers(1, 6)))]


@given(candidates(), st.integers(0, 100), st.booleans())
def test_what_is_eligible(offered, needed, adapter):
    able = eligible(offered, needed, adapter)
    alive = [c for c in offered if c.usable and c.responsive]
    assert bool(able) == bool(alive)
    assert all(c in alive for c in able)
    perfect = [
        c
        for c in alive
        if c.admitted and (c.takes_adapters or not adapter) and (c.free_blocks is None or c.free_blocks >= needed)
    ]
    if perfect:
        assert able == perfect


def test_conditions_that_nobody_meets_give_way():
    full = [Candidate("a", free_blocks=1), Candidate("b", free_blocks=2)]
    assert eligible(full, 3, adapter=False) == full
    assert eligible([*full, Candidate("c")], 3, adapter=False) == [Candidate("c")]
    broken = [Candidate("a", admitted=False), Candidate("b", admitted=False, free_blocks=0)]
    assert eligible(broken, 3, adapter=False) == broken[:1]


@given(candidates(), st.sampled_from(["", "x"]), st.sampled_from(["", "s", "t"]), st.integers(0, 99))
def test_the_choice_is_bounded(offered, adapter, session, seed):
    demand = replace(DEMAND, adapter=adapter, session=session)
    chosen = choose(offered, demand, Random(seed))
    low, high = min(c.load for c in offered), max(c.load for c in offered)
    assert chosen in offered
    if high - low > LOAD_GAP_TOKENS and high > LOAD_RATIO * low:
        assert chosen.load == low
    elif not any(c.foreign_requests for c in offered):
        allowed = max(PREFIX_WORTH * chosen.matched_tokens, ADAPTER_TOKENS if adapter and chosen.has_adapter else 0)
        assert chosen.load <= max(low + allowed, SESSION_BOUND * (low + allowed) if session else low)


@given(candidates(), st.integers(0, 99))
def test_with_others_about_two_are_compared(offered, seed):
    offered = [replace(c, load=c.load % 4000, matched_tokens=0, foreign_requests=1) for c in offered]
    chosen = choose(offered, DEMAND, Random(seed))
    if len(offered) > 1:
        assert sum(c.load >= chosen.load for c in offered) >= 2


def test_loads_far_apart_decide_alone():
    near, far = Candidate("near", load=10_000, matched_tokens=1000), Candidate("far")
    assert choose([near, far], DEMAND, Random(0)) is far


def test_the_gap_counts_and_not_the_load():
    """All are busy, and none much busier than the others: the prefix decides."""
    idle, holder = Candidate("idle", load=9000), Candidate("holder", load=9000 + PREFIX_WORTH, matched_tokens=1000)
    assert choose([idle, holder], DEMAND, Random(0)) is holder


@pytest.mark.parametrize(("low", "high", "chosen"), [
    (3 * LOAD_GAP_TOKENS, 4 * LOAD_GAP_TOKENS, "high"),  # the gap is wide enough, the ratio is not
    (1 * LOAD_GAP_TOKENS, 2 * LOAD_GAP_TOKENS, "high"),  # the gap is as wide as allowed
    (1 * LOAD_GAP_TOKENS, 2 * LOAD_GAP_TOKENS + 1, "low"),
    (2 * LOAD_GAP_TOKENS + 2, int(LOAD_RATIO * (2 * LOAD_GAP_TOKENS + 2)), "high"),  # so is the ratio
])  # fmt: skip
def test_both_the_gap_and_the_ratio_must_be_wide(low, high, chosen):
    demand = Demand(range(100_000), 100_000)
    offered = [Candidate("low", load=low), Candidate("high", load=high, matched_tokens=100_000)]
    assert choose(offered, demand, Random(0)).name == chosen


def test_what_the_least_loaded_holds_as_well_is_no_advantage():
    offered = [Candidate("a", matched_tokens=900), Candidate("b", load=PREFIX_WORTH * 101, matched_tokens=1000)]
    assert choose(offered, DEMAND, Random(0)).name == "a"
    offered[1] = replace(offered[1], load=PREFIX_WORTH * 100)
    assert choose(offered, DEMAND, Random(0)).name == "b"


@pytest.mark.parametrize("base", [0, 5000])
def test_an_adapters_price_is_above_the_least_load(base):
    demand = replace(DEMAND, adapter="x")
    offered = [Candidate("idle", load=base), Candidate("has", load=base + ADAPTER_TOKENS, has_adapter=True)]
    assert choose(offered, demand, Random(0)).name == "has"


def test_a_sessions_worker_may_be_a_quarter_busier():
    demand = replace(DEMAND, session="s")
    home = choose([Candidate("a"), Candidate("b")], demand, Random(0)).name
    at, other = int(SESSION_BOUND * 1000), "b" if home == "a" else "a"
    assert choose([Candidate(home, load=at), Candidate(other, load=1000)], demand, Random(0)).name == home
    assert choose([Candidate(home, load=at + 1), Candidate(other, load=1000)], demand, Random(0)).name == other


def test_two_workers_are_both_compared_though_others_use_them():
    offered = [Candidate("a", load=1, foreign_requests=1), Candidate("b", foreign_requests=1)]
    assert {choose(offered, DEMAND, Random(seed)).name for seed in range(50)} == {"b"}


def test_of_three_that_others_use_the_busiest_alone_is_never_taken():
    offered = [Candidate("a"), Candidate("b", load=1), Candidate("c", load=2, foreign_requests=1)]
    assert {choose(offered, DEMAND, Random(seed)).name for seed in range(100)} == {"a", "b"}
    assert {choose([replace(c, foreign_requests=0) for c in offered], DEMAND, Random(n)).name for n in range(50)} == {
        "a"
    }


def test_the_longest_prefix_decides():
    some, most = Candidate("some", matched_tokens=400), Candidate("most", load=300, matched_tokens=800)
    assert choose([some, most, Candidate("none")], DEMAND, Random(0)) is most


def test_a_short_prefix_does_not():
    assert choose([Candidate("a", load=10, matched_tokens=300), Candidate("b")], DEMAND, Random(0)).name == "b"


def test_a_prefix_has_its_price():
    demand, most = Demand(range(100), 100), PREFIX_WORTH * 96
    assert choose([Candidate("a", load=most, matched_tokens=96), Candidate("b")], demand, Random(0)).name == "a"
    assert choose([Candidate("a", load=most + 1, matched_tokens=96), Candidate("b")], demand, Random(0)).name == "b"


def test_an_adapter_in_a_slot_decides():
    has, idle = Candidate("has", load=ADAPTER_TOKENS, has_adapter=True), Candidate("idle")
    demand = replace(DEMAND, adapter="x")
    assert choose([has, idle], demand, Random(0)) is has
    assert choose([replace(has, load=ADAPTER_TOKENS + 1), idle], demand, Random(0)) is idle
    assert choose([has, idle], DEMAND, Random(0)) is idle


def test_a_session_stays_where_it_is_until_its_worker_is_busy():
    offered = [Candidate(name) for name in "abcde"]
    homes = {s: choose(offered, replace(DEMAND, session=str(s)), Random()).name for s in range(50)}
    assert len(set(homes.values())) == 5
    for session, home in homes.items():
        demand = replace(DEMAND, session=str(session))
        fewer = [c for c in offered if c.name == home or c.name in "ab"]
        assert choose(fewer, demand, Random()).name == home  # it moves only when its worker is gone
        loaded = [replace(c, load=1000 if c.name == home else 900) for c in offered]
        assert choose(loaded, demand, Random()).name == home
        busy = [replace(c, load=2000 if c.name == home else 900) for c in offered]
        assert choose(busy, demand, Random()).name != home


def test_equal_workers_are_chosen_equally():
    random = Random(1)
    taken = Counter(choose([Candidate(n) for n in "abc"], DEMAND, random).name for _ in range(3000))
    assert all(800 < count < 1200 for count in taken.values())


@pytest.mark.parametrize("foreign", [0, 1])
def test_the_number_of_requests_decides_between_equal_loads(foreign):
    offered = [Candidate("a", inflight=2, foreign_requests=foreign), Candidate("b", inflight=1)]
    assert choose(offered, DEMAND, Random(0)).name == "b"
