"""A request that comes twice under one key is computed once."""

from __future__ import annotations

import pytest

from inference.admission.idempotency import KEPT_S, RECORD_BYTES, IdempotencyStore, fingerprint_of
from inference.errors import NotReplayable, OtherRequest, StillRunning
from management.snapshot import ApiKeyEntry, hash_key
from tests.unit.scripts import Gate, Script, ids, says
from tests.unit.test_failures import DIALECTS

ASK = {"model": "demo", "prompt": "The capital"}
PATH = "/v1/completions"
STREAMS = {
    "openai": ("front", PATH, {**ASK, "stream": True}),
    "tgi": ("front", "/generate_stream", {"inputs": "The capital"}),
    "mindie": ("mindie", "/infer", {"inputs": "The capital", "stream": True}),
}
KEY = {"idempotency_key": "one"}
NAME, PRINT = ("k1", "front /a", "one"), fingerprint_of(b"a")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def send(recording, status=200, body=b"{}", more=False):
    recording.note({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"a/b")]})
    if more:
        recording.note({"type": "http.response.body", "body": body, "more_body": True})
    recording.note({"type": "http.response.body", "body": b"" if more else body})


def keep(store, name=NAME, fingerprint=PRINT, **sent):
    assert store.find(name, fingerprint) is None
    with store.recording(name, fingerprint) as recording:
        send(recording, **sent)


def test_a_response_is_kept_for_a_day():
    clock = Clock()
    store = IdempotencyStore(1 << 20, clock)
    keep(store, body=b"abc")
    assert store.find(NAME, PRINT).body == b"abc"
    clock.now = KEPT_S - 1
    assert store.find(NAME, PRINT) is not None
    clock.now = KEPT_S
    assert store.find(NAME, PRINT) is None


def test_while_it_runs_the_same_request_waits_and_another_is_wrong():
    store = IdempotencyStore(1 << 20)
    with store.recording(NAME, PRINT) as recording:
        with pytest.raises(StillRunning):
            store.find(NAME, PRINT)
        with pytest.raises(OtherRequest):
            store.find(NAME, fingerprint_of(b"b"))
        assert store.find(("k2", *NAME[1:]), PRINT) is None
        send(recording)
    assert store.find(NAME, PRINT) is not None


def test_a_failure_leaves_nothing():
    store = IdempotencyStore(1 << 20)
    for status in (429, 500, 503):
        keep(store, status=status)
    with pytest.raises(ValueError, match="broken"), store.recording(NAME, PRINT):
        raise ValueError("broken")
    assert (store.find(NAME, PRINT), store._bytes, len(store._records)) == (None, 0, 0)


def test_streams_and_giants_are_not_kept_but_remembered():
    store = IdempotencyStore(1 << 20)
    keep(store, more=True)
    keep(store, ("k1", "front /a", "two"), body=b"x" * (1 << 20))
    for name in (NAME, ("k1", "front /a", "two")):
        with pytest.raises(NotReplayable):
            store.find(name, PRINT)


def test_the_oldest_give_way():
    store = IdempotencyStore(10 * RECORD_BYTES)
    names = [("k1", "front /a", str(number)) for number in range(30)]
    with store.recording(NAME, PRINT) as recording:
        for name in names:
            keep(store, name, body=b"x" * 100)
        assert store._bytes <= 10 * RECORD_BYTES
        assert store.find(names[0], PRINT) is None
        assert store.find(names[-1], PRINT) is not None
        send(recording)
    assert store.find(NAME, PRINT) is not None or len(store._records) <= 10


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_every_dialect_answers_a_second_time_without_computing(serving, dialect):
    plane, path, body = DIALECTS[dialect]
    first = await serving.post(path, body, plane=plane, **KEY)
    second = await serving.post(path, body, plane=plane, **KEY)
    assert (first.status, first.header("idempotent-replayed")) == (200, None)
    assert (second.status, second.body, second.header("idempotent-replayed")) == (200, first.body, "true")
    assert second.header("content-type") == first.header("content-type")
    names = [name for name, _ in second.headers]
    assert len(names) == len(set(names)), names
    assert len(serving.worker.submits) == 1
    assert "dragoman_idempotent_replays_total 1.0" in serving.services.metrics.render().decode()


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_every_dialect_refuses_another_request_under_the_key(serving, dialect):
    plane, path, body = DIALECTS[dialect]
    assert (await serving.post(path, body, plane=plane, **KEY)).status == 200
    other = await serving.post(path, {**body, "user": "x"}, plane=plane, **KEY)
    assert other.status == 422
    assert "error" in other.json()
    assert len(serving.worker.submits) == 1


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_every_dialect_says_that_the_first_still_runs(serving, dialect):
    plane, path, body = DIALECTS[dialect]
    gate = Gate()
    serving.worker.scripts.append(Script(tokens=ids(" of Spain"), gate_after=1, gate=gate))
    first = serving.begin(path, body, plane=plane, **KEY)
    await gate.reached.wait()
    second = await serving.post(path, body, plane=plane, **KEY)
    assert (second.status, second.header("retry-after")) == (409, "1")
    gate.open()
    assert (await first.end()).status == 200
    assert (await serving.post(path, body, plane=plane, **KEY)).header("idempotent-replayed") == "true"


async def test_streams_are_not_replayed(serving):
    asked = {**ASK, "stream": True}
    assert (await serving.post(PATH, asked, **KEY)).events[-1] == "[DONE]"
    again = await serving.post(PATH, asked, **KEY)
    assert (again.status, again.header("x-should-retry")) == (409, "false")
    assert again.json()["error"]["type"] == "stream_not_replayable"


async def test_who_failed_or_left_may_try_again(serving):
    serving.worker.scripts.append(Script(fail_after=0))
    assert (await serving.post(PATH, ASK, **KEY)).status == 500
    gate = Gate()
    serving.worker.scripts.append(Script(tokens=ids(" of Spain"), gate_after=1, gate=gate))
    left = serving.begin(PATH, ASK, **KEY)
    await gate.reached.wait()
    left.hang_up()
    await left.task
    serving.worker.scripts.append(says(" of Spain"))
    assert (await serving.post(PATH, ASK, **KEY)).json()["choices"][0]["text"] == " of Spain"


@pytest.mark.parametrize("dialect", STREAMS)
async def test_whose_stream_failed_or_was_left_may_try_again(serving, dialect):
    plane, path, body = STREAMS[dialect]
    serving.worker.scripts.append(Script(tokens=ids(" of Spain"), fail_after=1))
    failed = await serving.post(path, body, plane=plane, **KEY)
    assert failed.status == 200
    gate = Gate()
    serving.worker.scripts.append(Script(tokens=ids(" of Spain"), gate_after=1, gate=gate))
    left = serving.begin(path, body, plane=plane, **KEY)
    await left.chunks(1)
    left.hang_up()
    await left.task
    serving.worker.scripts.append(says(" of Spain is Madrid"))
    whole = await serving.post(path, body, plane=plane, **KEY)
    assert (whole.status, b"Madrid" in whole.body) == (200, True)
    assert (await serving.post(path, body, plane=plane, **KEY)).status == 409


async def test_keys_of_others_and_other_routes_are_other_keys(start):
    serving = await start(api_key_required=True)
    scopes = frozenset({"infer"})
    serving.keys = {name: ApiKeyEntry(name, name, hash_key(f"{name}.s"), scopes, None) for name in ("k1", "k2")}
    serving.publish()
    for number, (name, path) in enumerate([("k1", PATH), ("k2", PATH), ("k1", "/generate"), ("k1", f"{PATH}?a=b")], 1):
        answer = await serving.post(path, ASK, authorization=f"Bearer {name}.s", **KEY)
        if "?" in path:
            assert answer.status == 422
            continue
        assert answer.header("idempotent-replayed") is None
        assert len(serving.worker.submits) == number


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb", "\xe4"])
async def test_keys_have_a_form(serving, key):
    answer = await serving.post(PATH, ASK, idempotency_key=key)
    assert answer.status == 400
    assert answer.json()["error"]["param"] == "Idempotency-Key"
    assert not serving.worker.submits


async def test_without_memory_the_header_means_nothing(start):
    serving = await start(max_idempotency_bytes=0)
    for _ in range(2):
        assert (await serving.post(PATH, ASK, **KEY)).header("idempotent-replayed") is None
    assert len(serving.worker.submits) == 2


@pytest.mark.parametrize(
    ("key", "status"), [("k" * 255, 200), ("k" * 256, 400), ("", 400), ("a\x7f", 400), ("a b", 200)]
)
async def test_which_keys_are_taken(serving, key, status):
    answer = await serving.post(PATH, ASK, idempotency_key=key)
    assert answer.status == status
    assert status == 200 or "1 to 255 printable ASCII characters" in answer.text


def test_parts_of_a_fingerprint_are_kept_apart():
    assert (
        len(
            {
                fingerprint_of(*parts)
                for parts in [(b"ab", b"c"), (b"a", b"bc"), (b"abc",), (b"abc", b""), (b"1:a",), (b"a",)]
            }
        )
        == 6
    )
