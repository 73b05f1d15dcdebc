"""Rates that several meters count together through a real Redis, which is killed, emptied and paused."""

from __future__ import annotations

import random
import re

import pytest

from config.shared_rates import ledger_of
from inference.admission.rates import RateMeter
from inference.admission.redis_ledger import BALANCES
from inference.admission.shared_rates import LedgerAway, SharedRates
from inference.errors import QuotaExhausted, RateLimited
from management.snapshot import ApiKeyEntry, KeyLimits, hash_key
from tests.own_redis import PASSWORD, OwnRedis


@pytest.fixture(scope="module")
def server():
    server = OwnRedis()
    yield server
    server.stop()


@pytest.fixture
def own(server):
    """Empty at first, and there again afterwards."""
    server.client.flushall()
    yield server
    server.stop()
    server.start()


def entry(name: str = "k1", **limits: float) -> ApiKeyEntry:
    return ApiKeyEntry(name, name, hash_key(f"{name}.secret"), frozenset({"infer"}), None, limits=KeyLimits(**limits))


class Process:
    """What a web process has of it."""

    def __init__(self, url: str, name: str) -> None:
        self.meter = RateMeter()
        self.rates = SharedRates(self.meter, ledger_of(url, name))

    def admitted(self, key: ApiKeyEntry, most: int = 1000) -> int:
        """How many requests pass until one is refused."""
        for count in range(most):
            try:
                self.meter.admit(key)
            except RateLimited:
                return count
        return most


async def exchange(*processes: Process) -> None:
    """All know what all have charged."""
    for process in [*processes, *processes]:
        await process.rates.exchange()


@pytest.fixture
async def three(server):
    processes = [Process(server.url, name) for name in "abc"]
    yield processes
    for process in processes:
        await process.rates._ledger.close()


async def test_requests_are_counted_together(own, three):
    a, b, c = three
    key = entry(requests_per_minute=6)
    for process in three:
        process.meter.check(key)
    assert a.admitted(key, most=4) == 4
    await exchange(*three)
    assert b.admitted(key) == 2
    await exchange(*three)
    assert [a.admitted(key), c.admitted(key)] == [0, 0]
    assert (b"x-ratelimit-remaining-requests", b"0") in a.meter.headers(key)


async def test_tokens_and_days_too_and_they_outlive_the_processes(own, three):
    a, b, _ = three
    key = entry(tokens_per_minute=600, tokens_per_day=1000)
    a.meter.admit(key)
    a.meter.charge("k1", 650)
    b.meter.check(key)
    await exchange(a, b)
    with pytest.raises(RateLimited):
        b.meter.check(key)
    b.meter.charge("k1", 350)
    await exchange(b)
    later = Process(own.url, "later")
    later.meter.check(key)
    await exchange(later)
    with pytest.raises(QuotaExhausted):
        later.meter.check(key)
    await later.rates._ledger.close()


async def test_as_many_pass_as_in_one_process(own, three):
    """In any order, as long as they hear of each other."""
    key, choose = entry(tokens_per_day=10_000, requests_per_minute=100_000), random.Random(4)
    spent = 0
    for _ in range(200):
        process = choose.choice(three)
        await process.rates.exchange()
        try:
            process.meter.admit(key)
        except QuotaExhausted:
            assert spent >= 10_000
            continue
        assert spent < 10_000
        tokens = choose.randrange(400)
        process.meter.charge("k1", tokens)
        spent += tokens
        await process.rates.exchange()
    assert spent >= 10_000


async def test_what_is_charged_during_an_exchange_is_told_by_the_next(own, three):
    a, b, _ = three
    key = entry(tokens_per_day=100)
    a.meter.admit(key)
    ask = a.rates._ledger.exchange

    async def meanwhile(entries):
        a.meter.charge("k1", 60)
        return await ask(entries)

    a.rates._ledger.exchange = meanwhile
    await a.rates.exchange()
    a.rates._ledger.exchange = ask
    a.meter.charge("k1", 50)
    with pytest.raises(QuotaExhausted):
        a.meter.check(key)
    b.meter.check(key)
    await exchange(a, b)
    with pytest.raises(QuotaExhausted):
        b.meter.check(key)
    assert own.client.hget(f"{BALANCES}k1", "spent") == b"110"


async def test_an_emptied_redis_learns_what_the_processes_know(own, three):
    a, b, c = three
    key = entry(tokens_per_day=1000, requests_per_minute=1000)
    for process in three:
        process.meter.admit(key)
        process.meter.charge("k1", 300)
    await exchange(*three)
    own.client.flushall()
    a.meter.charge("k1", 50)
    await exchange(*three)
    assert own.client.hget(f"{BALANCES}k1", "spent") == b"950"
    c.meter.charge("k1", 50)
    await exchange(*three)
    with pytest.raises(QuotaExhausted):
        b.meter.check(key)


@pytest.mark.parametrize("how", ["killed", "paused"])
async def test_without_redis_each_process_keeps_to_its_part(own, three, how):
    key = entry(requests_per_minute=6, tokens_per_day=90)
    for process in three:
        process.meter.check(key)
    await exchange(*three)
    own.stop() if how == "killed" else own.pause()
    await exchange(*three)
    assert [process.rates.reachable for process in three] == [False] * 3
    assert [process.admitted(key) for process in three] == [2, 2, 2]
    for process in three:
        process.meter.charge("k1", 29)
        assert process.meter._accounts["k1"].spent == 87
        process.meter.charge("k1", 1)
        with pytest.raises(QuotaExhausted):
            process.meter.check(key)
    own.start() if how == "killed" else own.resume()
    await exchange(*three)
    assert [process.rates.reachable for process in three] == [True] * 3
    assert own.client.hget(f"{BALANCES}k1", "spent") == b"90"
    assert [process.admitted(key) for process in three] == [0, 0, 0]


async def test_a_limit_that_is_added_later_begins_full(own, three):
    a, b, _ = three
    before, after = entry(requests_per_minute=1000), entry(requests_per_minute=1000, tokens_per_minute=50)
    a.meter.admit(before)
    a.meter.charge("k1", 100_000)
    await exchange(a)
    a.meter.check(after)
    b.meter.check(after)
    await exchange(a, b)
    b.meter.admit(after)


@pytest.mark.parametrize(
    "url", ["redis://:wrong@127.0.0.1:{port}/0", "redis://127.0.0.1:{port}/0", "redis://127.0.0.1:1/0"]
)
async def test_why_it_is_away(own, url):
    ledger = ledger_of(url.format(port=own.port), "a")
    with pytest.raises(LedgerAway) as away:
        await ledger.exchange([])
    assert re.match("AuthenticationError|ConnectionError", str(away.value))
    assert PASSWORD not in str(away.value)
    assert "wrong@" not in str(away.value)
    await ledger.close()


async def test_more_entries_than_one_exchange_has_room_for(own, three, monkeypatch):
    monkeypatch.setattr("inference.admission.redis_ledger.AT_ONCE", 2)
    a, b, _ = three
    keys = [entry(f"k{number}", requests_per_minute=10) for number in range(5)]
    for count, key in enumerate(keys):
        for _ in range(count):
            a.meter.admit(key)
        b.meter.check(key)
    await exchange(a, b)
    assert [b.admitted(key) for key in keys] == [10, 9, 8, 7, 6]


async def test_a_process_takes_the_ledger_for_reachable_until_it_is_not(own, three):
    process = three[0]
    assert process.rates.reachable
    own.stop()
    await process.rates.exchange()
    assert not process.rates.reachable
    own.start()
    await process.rates.exchange()
    assert process.rates.reachable
