"""Blocks: references, the prefix cache, eviction order; under random work nothing leaks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_pool import BlockPool
from engine.request import Request
from engine.sampling.params import SamplingParams


def request(tokens, salt=""):
    return Request((0, 0), list(tokens), SamplingParams(max_tokens=1), 0.0, cache_salt=salt)


def fill(pool, tokens, salt=""):
    made = request(tokens, salt)
    pool.extend_hashes(made)
    assert pool.allocate(made, len(made.token_ids))
    made.num_computed_tokens = len(made.token_ids)
    pool.cache(made, made.num_computed_tokens)
    return made


def test_a_freed_prefix_is_found_until_its_blocks_are_needed():
    pool = BlockPool(9, 4)
    first = fill(pool, range(16))
    blocks = list(first.block_table)
    pool.free(first)
    again = request([*range(12), 99, 99, 99, 99])
    pool.extend_hashes(again)
    assert pool.match(again.block_hashes) == blocks[:3]
    fill(pool, range(100, 116))  # takes the four blocks that hold nothing
    assert pool.match(again.block_hashes) == blocks[:3]
    fill(pool, range(200, 208))  # evicts from the end of the chain
    assert pool.match(again.block_hashes) == blocks[:2]
    pool.check_integrity()


def test_salts_keep_tenants_apart():
    pool = BlockPool(9, 4)
    pool.free(fill(pool, range(8), salt="a"))
    other = request(range(8), salt="b")
    pool.extend_hashes(other)
    assert pool.match(other.block_hashes) == []


def test_inserted_blocks_are_found_and_evict_nothing_of_their_chain():
    pool = BlockPool(9, 4)
    first = fill(pool, range(16))
    pool.free(first)
    wanted = request([*range(16), *range(50, 62), 1])
    pool.extend_hashes(wanted)
    chain = pool.reusable(wanted)
    assert (len(chain), len(pool.match(chain))) == (7, 4)
    fill(pool, range(100, 108))  # two of the four blocks that hold nothing
    new = pool.insert(chain)
    assert list(new) == chain[4:6]  # of three, as many as are free without those of the chain
    assert pool.match(chain) == [*pool.match(chain[:4]), *new.values()]
    assert pool.num_free == 6
    pool.check_integrity()
    pool.discard(new.values())
    assert len(pool.match(chain)) == 4
    pool.check_integrity()


def test_discarded_blocks_are_the_next_to_be_taken():
    pool = BlockPool(9, 4)
    pool.free(fill(pool, range(100, 116)))
    made = fill(pool, range(8))
    discarded = list(made.block_table)
    pool.free(made)
    pool.discard(discarded)
    assert sorted(fill(pool, range(50, 58)).block_table) == sorted(discarded)


def test_refreshed_blocks_are_evicted_last_and_the_first_of_them_last_of_all():
    pool = BlockPool(9, 4)
    old, new = fill(pool, range(16)), fill(pool, range(100, 116))
    blocks = list(old.block_table)
    pool.free(old)
    pool.free(new)
    pool.refresh(blocks)
    pool.check_integrity()
    fill(pool, range(200, 216))
    assert pool.match(old.block_hashes) == blocks, "the other chain went"
    fill(pool, range(300, 308))
    assert pool.match(old.block_hashes) == blocks[:2]


def test_filled_blocks_are_told_once():
    pool = BlockPool(9, 4)
    pool.filled = []
    made = fill(pool, range(10))
    assert pool.filled == list(zip(made.block_hashes, made.block_table[:2], strict=True))[::-1]
    pool.filled = []
    pool.free(made)
    again = request(range(9))
    pool.extend_hashes(again)
    pool.insert(pool.reusable(again))
    pool.cache(again, 0)
    assert pool.filled == []


def test_too_few_blocks_change_nothing():
    pool = BlockPool(4, 4)
    made = request(range(40))
    assert not pool.allocate(made, 40)
    assert made.block_table == []
    assert pool.num_free == 3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), max_size=60))
def test_random_work_leaks_nothing(steps):
    pool = BlockPool(24, 4)
    alive = []
    for kind, length in steps:
        if kind and alive:
            pool.free(alive.pop(length % len(alive)))
            continue
        made = request(range(length))
        pool.extend_hashes(made)
        hit = pool.match(made.block_hashes)
        if -(-length // 4) - len(hit) > pool.num_free_after(hit):
            continue
        pool.touch(hit)
        made.block_table = hit
        assert pool.allocate(made, length)
        made.num_computed_tokens = length
        pool.cache(made, made.num_computed_tokens)
        alive.append(made)
        pool.check_integrity()
    for made in alive:
        pool.free(made)
    pool.check_integrity()
    assert pool.num_free == pool.num_usable
