"""What a server counts of use: by key, deployment, adapter and end user, in every dialect."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime

import pytest

from inference.metrics import usage
from inference.metrics.usage import OTHERS, UsageRecorder
from inference.telemetry.base import EmbeddingRun
from management.snapshot import AdapterEntry, ApiKeyEntry, hash_key
from management.usage import Sums, UsageOf
from tests.unit.scripts import EMBEDDING, says

KEY = {"authorization": "Bearer abcd.secret"}


def counting(serving, end_users="plain") -> UsageRecorder:
    recorder = UsageRecorder(end_users, "secret")
    serving.services.generator.observers.append(recorder)
    serving.keys["abcd"] = ApiKeyEntry("abcd", "", hash_key("abcd.secret"), frozenset({"infer"}), None)
    serving.publish()
    return recorder


def taken(recorder: UsageRecorder) -> dict[UsageOf, Sums]:
    """The next batch, as a writer takes it; without the times."""
    recorder.refresh()
    batch = dict(recorder.batch())
    recorder.stored()
    for sums in batch.values():
        assert abs((datetime.now(UTC) - sums.last_at).total_seconds()) < 60
        sums.last_at = None
    return batch


def count(recorder: UsageRecorder, key="k", end_user="") -> None:
    """A request for embeddings."""
    now = time.monotonic()
    recorder.embedded(EmbeddingRun(None, "r", "openai", key, "demo", "d", end_user, 1, 2, now, now, now, None))


def of(key="", adapter="", end_user="", deployment="") -> UsageOf:
    return UsageOf(datetime.now(UTC).date(), key, deployment, adapter, end_user)


async def test_requests_of_keys_and_end_users(serving):
    recorder = counting(serving)
    serving.worker.default = says(" Rome.")
    ask = {"model": "demo", "prompt": "The capital", "user": "anna"}
    assert (await serving.post("/v1/completions", ask, **KEY)).status == 200
    assert (await serving.post("/v1/completions", {**ask, "safety_identifier": "hashed"}, **KEY)).status == 200
    assert (await serving.post("/generate", {"inputs": "The capital"})).status == 200
    chat = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "user": "anna", "stream": True}
    assert (await serving.post("/v1/chat/completions", chat, **KEY)).status == 200
    assert (
        await serving.post("/v1/responses", {"model": "demo", "input": "Hi", "safety_identifier": "anna"})
    ).status == 200
    batch = taken(recorder)
    assert set(batch) == {of("abcd", end_user="anna"), of("abcd", end_user="hashed"), of(), of(end_user="anna")}
    assert batch[of("abcd", end_user="hashed")] == Sums(1, 0, 2, 0, 3)
    assert batch[of("abcd", end_user="anna")].requests == 2
    assert taken(recorder) == {}


async def test_adapters_count(serving):
    recorder = counting(serving)
    serving.adapters = (AdapterEntry("pirate", "a" * 64, "/adapters/pirate", 1),)
    serving.publish()
    serving.worker.default = says(" Rome.")
    assert (await serving.post("/v1/completions", {"model": "pirate", "prompt": "The capital"})).status == 200
    assert set(taken(recorder)) == {of(adapter="pirate")}


async def test_what_fails_before_its_first_token_costs_no_prompt(serving):
    recorder = counting(serving)
    serving.worker.default = says(" Rome.", fail_after=0)
    assert (await serving.post("/v1/completions", {"model": "demo", "prompt": "The capital"})).status == 500
    assert taken(recorder) == {of(): Sums(1, 1, 0, 0, 0)}


async def test_embeddings_count(start):
    serving = await start(info=EMBEDDING)
    recorder = counting(serving)
    body = {"model": "demo", "input": ["The capital", "a"], "user": "anna"}
    assert (await serving.post("/v1/embeddings", body, **KEY)).status == 200
    (sums,) = taken(recorder).values()
    assert (sums.requests, sums.failed, sums.output_tokens) == (1, 0, 0)
    assert sums.prompt_tokens > 2


@pytest.mark.parametrize(("how", "shown"), [
    ("plain", "anna\u00e9" + "x" * 59), ("off", ""), ("hash", "[0-9a-f]{16}"),
])  # fmt: skip
def test_how_end_users_are_named(how, shown):
    recorder = UsageRecorder(how, "secret")
    count(recorder, end_user="an\x00na\n\u00e9" + "x" * 100)
    ((found, _),) = taken(recorder).items()
    assert re.fullmatch(shown, found.end_user)


def test_too_many_end_users_are_counted_together(monkeypatch):
    monkeypatch.setattr(usage, "MAX_END_USERS", 3)
    recorder = UsageRecorder("plain", "secret")
    for number in [*range(10), 1]:
        count(recorder, end_user=f"user-{number}")
    count(recorder, "other", "user-9")
    found = {(o.key, o.end_user): sums.requests for o, sums in taken(recorder).items()}
    assert found == {
        ("k", "user-0"): 1, ("k", "user-1"): 2, ("k", "user-2"): 1, ("k", OTHERS): 7, ("other", "user-9"): 1,
    }  # fmt: skip


def test_a_batch_stays_until_it_is_stored():
    recorder = UsageRecorder("plain", "secret")
    count(recorder)
    recorder.refresh()
    count(recorder)
    recorder.refresh()
    assert [sums.requests for sums in recorder.batch().values()] == [1]
    recorder.stored()
    recorder.refresh()
    assert [sums.requests for sums in recorder.batch().values()] == [1]


def test_what_is_not_stored_yet_is_spent_too():
    told = []
    recorder = UsageRecorder("plain", "secret", lambda day, tokens: told.append((day, tokens)))
    today = datetime.now(UTC).date()
    count(recorder)
    recorder.refresh()
    count(recorder)
    recorder.spent(today, {"k": 100, "other": 7})
    recorder.refresh()
    recorder.refresh()
    assert told == [((today - usage.EPOCH).days, {"k": 104, "other": 7})]
