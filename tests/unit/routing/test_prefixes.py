"""The prefixes that were sent to a worker, by the hashes of the engine's own cache."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.block_pool import BlockPool
from engine.messages import AdapterRef
from engine.request import Request
from engine.sampling.params import SamplingParams
from inference.workers.routing.demand import MAX_HASHED_TOKENS, Demand
from inference.workers.routing.prefixes import PrefixMemory

tokens = st.lists(st.integers(0, 200_000), min_size=1, max_size=100)


def engine_hashes(token_ids, block_size, salt, adapter):
    pool = BlockPool(4, block_size)
    ref = AdapterRef(adapter, "/a") if adapter else None
    request = Request((0, 0), list(token_ids), SamplingParams(max_tokens=1), 0.0, cache_salt=salt, adapter=ref)
    pool.extend_hashes(request)
    return request.block_hashes


@given(tokens, st.integers(1, 32), st.text(max_size=8), st.sampled_from(["", "a" * 64]))
def test_the_hashes_are_those_of_the_engine(token_ids, block_size, salt, adapter):
    demand = Demand(token_ids, 1, cache_salt=salt, adapter=adapter)
    hashes = demand.block_hashes(block_size)
    assert hashes == engine_hashes(token_ids, block_size, salt, adapter)
    assert len(hashes) == len(token_ids) // block_size


@given(tokens, tokens, st.integers(1, 16))
def test_a_longer_prompt_goes_on_from_the_hashes_so_far(begin, end, block_size):
    demand = Demand(begin, 1, cache_salt="s")
    short = list(demand.block_hashes(block_size))
    longer = demand.longer([*begin, *end], 1)
    assert longer.block_hashes(block_size) == engine_hashes([*begin, *end], block_size, "s", "")
    assert demand.block_hashes(block_size) == short


def test_tenants_and_adapters_have_different_hashes():
    base = [Demand(range(16), 1, cache_salt=s, adapter=a).block_hashes(16)[0] for s in "ab" for a in ("", "x")]
    assert len(set(base)) == 4


def test_what_does_not_read_the_cache_is_not_hashed():
    assert Demand(range(100), 1, reads_cache=False).block_hashes(16) == []


def test_very_long_prompts_are_hashed_in_part():
    assert len(Demand(range(2 * MAX_HASHED_TOKENS), 1).block_hashes(16)) == MAX_HASHED_TOKENS // 16


def test_the_longest_known_prefix_is_found():
    memory = PrefixMemory(100)
    first = Demand(list(range(64)), 1).block_hashes(16)
    memory.record(first)
    second = Demand([*range(40), 7, *range(41, 64)], 1).block_hashes(16)
    assert memory.match(first) == 4
    assert memory.match(second) == 2
    assert PrefixMemory(100).match(first) == 0


def test_a_chain_is_forgotten_from_its_end_and_the_oldest_first():
    memory = PrefixMemory(6)
    old, new = (Demand([n] * 64, 1).block_hashes(16) for n in (1, 2))
    memory.record(old)
    memory.record(new)
    assert (memory.match(old), memory.match(new)) == (2, 4)


@given(st.lists(st.lists(st.integers(0, 3), max_size=40), max_size=20), st.integers(1, 12))
def test_it_never_outgrows_its_capacity_and_knows_the_last_prompt(prompts, capacity):
    memory = PrefixMemory(capacity)
    for prompt in prompts:
        hashes = Demand(prompt, 1).block_hashes(4)
        memory.record(hashes)
        assert len(memory) <= capacity
        assert memory.match(hashes) == min(len(hashes), capacity)
