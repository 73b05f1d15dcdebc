"""Limits of an API key: how much it has left, what it is told, and when it may come again."""

from __future__ import annotations

import pytest

from inference.admission.rates import DAY_S, Charge, RateMeter, span
from inference.errors import QuotaExhausted, RateLimited
from inference.http.exchange import retry_headers
from management.snapshot import ApiKeyEntry, KeyLimits, hash_key
from tests.unit.scripts import Script, ids
from tests.unit.test_failures import DIALECTS

ASK = {"model": "demo", "prompt": "The capital"}
PATH = "/v1/completions"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def entry(name: str = "k1", **limits: float) -> ApiKeyEntry:
    return ApiKeyEntry(name, name, hash_key(f"{name}.secret"), frozenset({"infer"}), None, limits=KeyLimits(**limits))


BEARER = {"authorization": "Bearer k1.secret"}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limited(start, clock):
    """A server whose only key has these limits."""

    async def begin(**limits):
        serving = await start(api_key_required=True, rates=RateMeter(clock, clock))
        serving.keys = {"k1": entry(**limits)}
        serving.publish()
        return serving

    return begin


def test_requests_come_back_steadily(clock):
    meter, key = RateMeter(clock, clock), entry(requests_per_minute=6)
    for _ in range(6):
        meter.admit(key)
    with pytest.raises(RateLimited) as refused:
        meter.admit(key)
    assert refused.value.retry_after_s == pytest.approx(10)
    clock.now += 10
    meter.admit(key)
    with pytest.raises(RateLimited):
        meter.check(key)
    clock.now += 3600
    assert meter.headers(key)[1] == (b"x-ratelimit-remaining-requests", b"6")


def test_tokens_are_charged_afterwards_and_may_be_overdrawn(clock):
    meter, key = RateMeter(clock, clock), entry(tokens_per_minute=60)
    meter.admit(key)
    meter.admit(key)
    meter.charge("k1", 100)
    with pytest.raises(RateLimited) as refused:
        meter.admit(key)
    assert refused.value.retry_after_s == pytest.approx(41)
    assert meter.headers(key)[1:] == [
        (b"x-ratelimit-remaining-tokens", b"0"),
        (b"x-ratelimit-reset-tokens", b"1m40s"),
    ]
    clock.now += 41
    meter.admit(key)


def test_a_day_ends_at_midnight(clock):
    clock.now = 2 * DAY_S - 30
    meter, key = RateMeter(clock, clock), entry(tokens_per_day=10)
    meter.admit(key)
    meter.charge("k1", 10)
    with pytest.raises(QuotaExhausted) as refused:
        meter.admit(key)
    assert retry_headers(refused.value) == [
        (b"x-should-retry", b"false"), (b"retry-after", b"30"), (b"retry-after-ms", b"30000"),
    ]  # fmt: skip
    clock.now += 31
    meter.admit(key)


def test_a_client_is_never_told_to_wait_longer_than_it_would(clock):
    meter, key = RateMeter(clock, clock), entry(requests_per_minute=1, tokens_per_minute=1)
    meter.admit(key)
    meter.charge("k1", 100_000)
    with pytest.raises(RateLimited) as refused:
        meter.admit(key)
    assert dict(retry_headers(refused.value))[b"retry-after"] == b"60"
    clock.now += 60
    with pytest.raises(RateLimited) as refused:
        meter.admit(key)
    assert dict(retry_headers(refused.value))[b"retry-after"] == b"120"


def test_keys_without_limits_are_not_remembered(clock):
    meter = RateMeter(clock, clock)
    meter.admit(entry())
    meter.admit(None)
    meter.charge("k1", 5)
    assert (meter.headers(entry()), meter.headers(None), meter._accounts) == ([], [], {})


def test_accounts_are_active_while_they_are_asked_for_or_owe_news(clock):
    meter = RateMeter(clock, clock)
    asked, charged, quiet = (entry(name, requests_per_minute=60) for name in ("asked", "charged", "quiet"))
    for key in (asked, charged, quiet):
        meter.check(key)
    clock.now += 100
    meter.check(asked)
    meter.charge("charged", 5)
    clock.now += 60
    assert [name for name, _ in meter.active(60)] == ["asked", "charged"]
    clock.now += 1
    assert [name for name, _ in meter.active(60)] == ["charged"]


def test_what_is_active_is_told_as_it_is_now(clock):
    meter, key = RateMeter(clock, clock), entry(requests_per_minute=6)
    for _ in range(6):
        meter.admit(key)
    clock.now += 30
    ((_, account),) = meter.active(60)
    assert account.requests == pytest.approx(3)


def test_a_changed_limit_counts_at_once(clock):
    meter = RateMeter(clock, clock)
    meter.admit(entry(requests_per_minute=100))
    meter.admit(entry(requests_per_minute=1))
    with pytest.raises(RateLimited):
        meter.admit(entry(requests_per_minute=1))


def test_a_changed_limit_of_tokens_keeps_what_was_charged(clock):
    meter = RateMeter(clock, clock)
    meter.admit(entry(tokens_per_minute=100))
    meter.charge("k1", 90)
    assert meter.headers(entry(tokens_per_minute=50))[1] == (b"x-ratelimit-remaining-tokens", b"10")
    assert meter.headers(entry(tokens_per_minute=50, requests_per_minute=7))[1] == (
        b"x-ratelimit-remaining-requests", b"7",
    )  # fmt: skip


def test_what_others_were_told_counts_once(clock):
    """What was charged here while they were told is not in the balances that they answer."""
    meter, key = RateMeter(clock, clock), entry(requests_per_minute=100, tokens_per_minute=1000, tokens_per_day=5000)
    for _ in range(5):
        meter.admit(key)
    meter.charge("k1", 70)
    meter.told("k1", Charge(3, 50), 60, 400, 0, 900)
    balances = dict(meter.headers(key))
    assert balances[b"x-ratelimit-remaining-requests"] == b"58"  # 60 less the 2 that nobody was told of
    assert balances[b"x-ratelimit-remaining-tokens"] == b"380"
    ((_, account),) = meter.active(60)
    assert (account.untold, account.spent) == (Charge(2, 20), 920)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0ms"), (0.0165, "17ms"), (1, "1s"), (59.5, "1m0s"), (61, "1m1s")])
def test_spans(seconds, text):
    assert span(seconds) == text


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_every_dialect_says_429_before_it_reads_the_body(limited, dialect):
    serving = await limited(requests_per_minute=1)
    plane, path, body = DIALECTS[dialect]
    assert (await serving.post(path, body, plane=plane, **BEARER)).status == 200
    for given in (body, b"{", {"wrong": 1}):
        refused = await serving.post(path, given, plane=plane, **BEARER)
        assert refused.status == 429
        assert refused.header("retry-after") == "60"
        assert refused.header("x-ratelimit-remaining-requests") == "0"
    assert len(serving.worker.submits) == 1
    early = serving.planes[plane].preview("POST", path, {b"authorization": b"Bearer k1.secret"})
    assert early.status == 429
    assert (b"x-ratelimit-remaining-requests", b"0") in early.headers
    metrics = serving.services.metrics.render().decode()
    assert 'dragoman_refusals_total{reason="rate"} 4.0' in metrics


async def test_prompt_and_output_are_charged_when_the_stream_ends(limited):
    serving = await limited(tokens_per_minute=1000)
    serving.worker.scripts.append(Script(tokens=ids(" of Spain is")))
    first = await serving.post(PATH, {**ASK, "stream": True}, **BEARER)
    assert first.header("x-ratelimit-remaining-tokens") == "1000"
    spent = len(serving.worker.submits[0].prompt_token_ids) + len(ids(" of Spain is"))
    second = await serving.post(PATH, ASK, **BEARER)
    assert second.header("x-ratelimit-remaining-tokens") == str(1000 - spent)
    assert second.header("x-ratelimit-limit-tokens") == "1000"


async def test_what_never_ran_costs_no_tokens(limited):
    serving = await limited(tokens_per_minute=1000)
    serving.worker.scripts.append(Script(fail_after=0))
    assert (await serving.post(PATH, ASK, **BEARER)).status == 500
    assert (await serving.post(PATH, {**ASK, "temperature": 99}, **BEARER)).status == 400
    assert (await serving.post(PATH, ASK, **BEARER)).header("x-ratelimit-remaining-tokens") == "1000"


async def test_an_exhausted_quota_is_final_for_today(limited):
    serving = await limited(tokens_per_day=1)
    assert (await serving.post(PATH, ASK, **BEARER)).status == 200
    refused = await serving.post(PATH, ASK, **BEARER)
    assert (refused.status, refused.header("x-should-retry")) == (429, "false")
    assert 1 <= int(refused.header("retry-after")) <= 120


async def test_lists_and_health_are_free(limited):
    serving = await limited(requests_per_minute=1)
    for _ in range(3):
        assert (await serving.get("/v1/models", **BEARER)).status == 200
    assert (await serving.post(PATH, ASK, **BEARER)).status == 200


def test_what_is_recorded_of_a_day_counts(clock):
    """Of before a restart, and of other processes."""
    meter, key, today = RateMeter(clock, clock), entry(tokens_per_day=100), int(clock.now // DAY_S)
    meter.recorded(today, {"k1": 100, "k2": 5})
    with pytest.raises(
        QuotaExhausted, match=r"its 100 tokens of today\. The limit resets at 00:00 UTC, in 23 h 43 min\."
    ):
        meter.admit(key)
    meter.admit(entry("k2", tokens_per_day=100))
    meter.admit(entry("k3", tokens_per_day=100))
    meter.charge("k3", 99)
    meter.admit(entry("k3", tokens_per_day=100))
    meter.recorded(today, {"k3": 150})
    with pytest.raises(QuotaExhausted):
        meter.admit(entry("k3", tokens_per_day=100))
    clock.now += DAY_S
    meter.admit(key)


def test_the_record_of_another_day_counts_nothing(clock):
    meter = RateMeter(clock, clock)
    meter.recorded(int(clock.now // DAY_S) - 1, {"k1": 100})
    meter.admit(entry(tokens_per_day=100))
