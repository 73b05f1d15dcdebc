"""Which worker serves a request, and what happens when workers die, drain, fall silent or come back."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from engine import client as client_module
from engine.failures import Failure, FailureCode
from inference.workers.routing import retry_budget
from inference.workers.routing.backoff import FIRST_S
from inference.workers.routing.breaker import FAILURES
from tests.unit.fake_worker import FakeWorker, settle
from tests.unit.scripts import EMBEDDING, Gate, Script, ids, says
from tests.waiting import eventually

PATH = "/v1/completions"
ASK = {"model": "demo", "prompt": "The capital", "temperature": 0}
STREAM = {**ASK, "stream": True}
SPAIN = says(" of Spain")


def clients(serving):
    """By worker id."""
    return {w.worker_id: c for target in serving.router.targets for w, c in target.clients.items()}


async def test_the_least_busy_worker_gets_the_next_request(start):
    serving = await start(3)
    gate = Gate()
    for worker in serving.workers:
        worker.default = Script(tokens=ids("a b"), gate_after=1, gate=gate)
    calls = []
    for count in range(1, 7):
        calls.append(serving.begin(PATH, ASK))
        await eventually(lambda count=count: sum(len(w.submits) for w in serving.workers) == count)
    assert [len(w.submits) for w in serving.workers] == [2, 2, 2]
    for worker in serving.workers:
        gate.worker = worker
        gate.open()
    assert [(await call.end()).status for call in calls] == [200] * 6


async def test_a_worker_that_dies_before_the_first_token_hands_its_request_on(start):
    serving = await start(2)
    serving.workers[0].default, serving.workers[1].default = Script(die_after=0), SPAIN
    answer = await serving.post(PATH, ASK)
    assert (answer.status, answer.json()["choices"][0]["text"]) == (200, " of Spain")
    assert [len(w.submits) for w in serving.workers] == [1, 1]


async def test_it_is_handed_on_until_it_met_two_deaths(start):
    serving = await start(3)
    for worker in serving.workers:
        worker.default = Script(die_after=0)
    assert (await serving.post(PATH, ASK)).status == 500
    assert sorted(len(w.submits) for w in serving.workers) == [0, 1, 1]


async def test_what_met_two_deaths_meets_no_third(start):
    serving = await start(3)
    for worker in serving.workers[:2]:
        worker.default = Script(die_after=0)
    assert (await serving.post(PATH, ASK)).status == 500
    assert (await serving.post(PATH, ASK)).status == 500
    assert not serving.workers[2].submits
    assert (await serving.post(PATH, {**ASK, "prompt": "Something else"})).status == 200


async def test_a_draining_worker_gets_nothing_new_and_ends_what_it_has(start):
    serving = await start(2)
    first, second = serving.workers
    gate = Gate()
    first.default = Script(tokens=[*ids(" of Spain"), 2], gate_after=1, gate=gate)
    running = serving.begin(PATH, STREAM)
    await running.chunks(1)
    first.drain()
    await eventually(lambda: clients(serving)["demo/0"].draining)
    for _ in range(3):
        assert (await serving.post(PATH, ASK)).status == 200
    assert (len(first.submits), len(second.submits)) == (1, 3)
    gate.open()
    assert "".join(e["choices"][0]["text"] for e in (await running.end()).events[:-1]) == " of Spain"


async def test_a_worker_that_began_to_drain_unheard_hands_requests_on(start):
    serving = await start(2)
    serving.workers[0].draining = True
    assert (await serving.post(PATH, ASK)).status == 200
    assert [len(w.submits) for w in serving.workers] == [1, 1]


async def test_without_another_worker_a_drain_is_told(serving):
    serving.worker.draining = True
    answer = await serving.post(PATH, ASK)
    assert (answer.status, answer.json()["error"]["message"]) == (503, "The server is shutting down.")


async def test_a_worker_that_left_is_hung_up_on_when_it_is_idle(start):
    serving = await start(2)
    gate = Gate()
    serving.workers[1].default = serving.workers[0].default = Script(tokens=[*ids(" of"), 2], gate_after=1, gate=gate)
    calls = [serving.begin(PATH, STREAM) for _ in range(2)]
    for call in calls:
        await call.chunks(1)
    serving.publish(serving.workers[:1])
    await settle()
    assert set(clients(serving)) == {"demo/0", "demo/1"}  # it has a request of ours
    for worker in serving.workers:
        gate.worker = worker
        gate.open()
    assert [(await call.end()).status for call in calls] == [200, 200]
    await eventually(lambda: set(clients(serving)) == {"demo/0"})


async def test_a_replaced_worker_is_found(start, sockets):
    serving = await start(1)
    serving.worker.die("the engine broke")
    await eventually(lambda: not serving.router.ready)
    answer = await serving.post(PATH, ASK)
    assert (answer.status, answer.header("retry-after")) == (503, "2")
    serving.workers.append(await FakeWorker(sockets / "new.sock", "demo/0", epoch=2).start())
    serving.publish(serving.workers[1:])
    await serving.connected(1)
    assert (await serving.post(PATH, ASK)).status == 200


async def test_a_worker_of_another_epoch_is_not_talked_to(start, sockets):
    serving = await start(1)
    other = await FakeWorker(sockets / "other.sock", "demo/1", epoch=8).start()
    serving.workers.append(other)
    serving.publish([serving.worker, FakeWorker(sockets / "other.sock", "demo/1", epoch=7)])
    await eventually(lambda: other.hellos)
    await settle()
    assert set(clients(serving)) == {"demo/0"}
    assert (await serving.post(PATH, ASK)).status == 200


@pytest.fixture
def short_patience(monkeypatch):
    """Silence is noticed after five ticks of ten milliseconds."""
    monkeypatch.setattr(client_module, "TICK_S", 0.01)
    monkeypatch.setattr(client_module, "SUSPECT_AFTER_S", 0.05)


@asynccontextmanager
async def beating(*workers):
    """Heartbeats of these, faster than they are missed."""

    async def beat():
        while True:
            for worker in workers:
                worker.beat()
            await asyncio.sleep(0.005)

    task = asyncio.create_task(beat())
    yield
    task.cancel()


@pytest.mark.usefixtures("short_patience")
async def test_a_silent_worker_is_not_asked_and_its_queue_goes_to_another(start):
    serving = await start(2)
    silent, well = serving.workers
    silent.silent = True
    async with beating(well):
        waiting = serving.begin(PATH, ASK)
        await eventually(lambda: silent.submits)
        await eventually(lambda: clients(serving)["demo/0"].suspect)
        assert (await serving.post(PATH, ASK)).status == 200
        assert (await waiting.end()).status == 200
        assert (len(silent.submits), len(well.submits)) == (1, 2)
        silent.silent = False
        silent.beat()
        await eventually(lambda: not clients(serving)["demo/0"].suspect)


@pytest.mark.usefixtures("short_patience")
async def test_what_a_silent_worker_has_begun_stays_with_it(start):
    serving = await start(2)
    gate = Gate()
    serving.workers[0].default = Script(tokens=[*ids(" of Spain"), 2], gate_after=1, gate=gate)
    async with beating(serving.workers[1]):
        call = serving.begin(PATH, STREAM)
        await call.chunks(1)
        await eventually(lambda: clients(serving)["demo/0"].suspect)
        serving.router.targets[0].relieve()
        gate.open()
        answer = await call.end()
    assert "".join(e["choices"][0]["text"] for e in answer.events[:-1]) == " of Spain"
    assert not serving.workers[1].submits


@pytest.mark.usefixtures("short_patience")
async def test_without_another_worker_the_queue_stays_and_new_requests_are_refused(start):
    serving = await start(1)
    serving.worker.silent = True
    waiting = serving.begin(PATH, ASK)
    await eventually(lambda: serving.worker.submits)
    await eventually(lambda: clients(serving)["demo/0"].suspect)
    assert (await serving.post(PATH, ASK)).status == 503
    serving.worker.silent = False
    serving.worker.beat()
    serving.worker.go_on()
    assert (await waiting.end()).status == 200


async def test_a_worker_that_stays_silent_is_given_up(start, monkeypatch):
    monkeypatch.setattr(client_module, "TICK_S", 0.01)
    monkeypatch.setattr(client_module, "SUSPECT_AFTER_S", 0.05)
    monkeypatch.setattr(client_module, "DEAD_AFTER_S", 0.2)
    serving = await start(1)
    serving.worker.silent = True
    answer = await serving.post(PATH, ASK)
    assert answer.status == 503  # tried again, and no other worker is there
    assert answer.json()["error"]["message"].startswith("The model is not available at the moment")


async def test_what_a_given_up_worker_had_begun_goes_on_at_another(start, monkeypatch):
    monkeypatch.setattr(client_module, "TICK_S", 0.01)
    monkeypatch.setattr(client_module, "SUSPECT_AFTER_S", 0.05)
    monkeypatch.setattr(client_module, "DEAD_AFTER_S", 0.2)
    serving = await start(2)
    first, second = serving.workers
    first.default, second.default = Script(tokens=[*ids(" of Spain"), 2], gate_after=1, gate=Gate()), SPAIN
    async with beating(second):
        answer = await serving.post(PATH, STREAM)
    assert "".join(e["choices"][0]["text"] for e in answer.events[:-1]) == " of Spain"
    assert second.submits[0].generated == ids(" of Spain")[:1]


async def test_a_client_that_leaves_ends_its_request(serving):
    gate = Gate()
    serving.worker.default = Script(tokens=ids(" of Spain"), gate_after=1, gate=gate)
    for body in (STREAM, ASK):
        call = serving.begin(PATH, body)
        submitted = len(serving.worker.aborted) + 1
        await eventually(lambda submitted=submitted: len(serving.worker.submits) == submitted)
        await gate.reached.wait()
        call.hang_up()
        await call.task
        await eventually(lambda submitted=submitted: len(serving.worker.aborted) == submitted)
    assert serving.services.admission.in_flight == 0


async def test_a_stop_string_ends_the_request_in_the_engine(serving):
    serving.worker.default = Script(tokens=ids(" of Spain is Madrid"), gate_after=2)
    answer = await serving.post(PATH, {**ASK, "stop": [" Spain"]})
    assert answer.json()["choices"][0]["text"] == " of"
    await eventually(lambda: len(serving.worker.aborted) == 1)


async def test_one_failed_sequence_ends_the_others(serving):
    serving.worker.scripts.extend([Script(tokens=ids(" of Spain"), gate_after=1), Script(tokens=[5], fail_after=1)])
    answer = await serving.post(PATH, {**ASK, "n": 2, "temperature": 1.0})
    assert answer.status == 500
    await eventually(lambda: len(serving.worker.aborted) == 1)


async def test_what_a_worker_is_asked(serving):
    fields = {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_k": 3,
        "seed": 9,
        "n": 2,
        "cache_salt": "s",
        "stop_token_ids": [7],
    }
    assert (await serving.post(PATH, {**ASK, **fields})).status == 200
    first, second = serving.worker.submits
    assert first.prompt_token_ids == second.prompt_token_ids == ids("The capital")
    assert (first.params.seed, second.params.seed) == (9, 10)
    assert (first.params.max_tokens, first.params.temperature, first.params.top_k) == (5, 0.5, 3)
    assert (first.params.stop_token_ids, first.cache_salt) == ([7], ":s")
    assert 590 < first.timeout_s <= 600


async def test_a_reader_that_lags_gets_everything(serving):
    """Ten thousand tokens lie ready before the client reads its second chunk."""
    serving.worker.default = Script(tokens=ids(" of Spain") * 900, per_step=1)
    call = serving.begin(PATH, {**STREAM, "max_tokens": 1800, "ignore_eos": True})
    await call.chunks(1)
    call.read_no_more()
    await eventually(lambda: serving.worker.stats.generation_tokens == 1800)
    assert len(call.answer.chunks) < 100
    call.read_on()
    answer = await call.end()
    assert "".join(e["choices"][0]["text"] for e in answer.events[:-1]) == " of Spain" * 900


async def test_embeddings_are_tried_once_more(start):
    serving = await start(2, info=EMBEDDING)
    serving.workers[0].draining = True
    body = {"model": "demo", "input": "a"}
    assert (await serving.post("/v1/embeddings", body)).status == 200
    assert [len(w.embeds) for w in serving.workers] == [1, 1]


async def test_embeddings_are_tried_at_three_workers(start):
    serving = await start(3, info=EMBEDDING)
    first, second, third = serving.workers
    first.dies_of_embeddings, second.draining = True, True
    answer = await serving.post("/v1/embeddings", {"model": "demo", "input": "a"})
    assert (answer.status, len(third.embeds)) == (200, 1)


async def test_embeddings_that_no_worker_takes(start):
    serving = await start(1, info=EMBEDDING)
    serving.worker.embed_failure = Failure(FailureCode.DRAINING)
    assert (await serving.post("/v1/embeddings", {"model": "demo", "input": "a"})).status == 503
    assert len(serving.worker.embeds) == 1


async def test_an_overloaded_worker_hands_requests_on(start):
    serving = await start(3)
    overloaded = Script(fail_after=0, failure=Failure(FailureCode.OVERLOADED))
    for worker in serving.workers[:2]:
        worker.default = overloaded
    assert (await serving.post(PATH, ASK)).status == 200
    assert [len(w.submits) for w in serving.workers] == [1, 1, 1]
    serving.workers[2].default = overloaded
    assert (await serving.post(PATH, ASK)).status == 503


async def test_at_most_two_more_workers_are_asked(start):
    serving = await start(4)
    for worker in serving.workers:
        worker.default = Script(fail_after=0, failure=Failure(FailureCode.OVERLOADED))
    assert (await serving.post(PATH, ASK)).status == 503
    assert sum(len(w.submits) for w in serving.workers) == 3


async def test_retries_end_with_their_budget(start, monkeypatch):
    monkeypatch.setattr(retry_budget, "LEAST_PER_S", 0.1)
    serving = await start(2)
    serving.workers[0].default = serving.workers[1].default = Script(
        fail_after=0, failure=Failure(FailureCode.OVERLOADED)
    )
    for _ in range(4):
        await serving.post(PATH, ASK)
    assert sum(len(w.submits) for w in serving.workers) == 5


async def test_a_worker_that_fails_again_and_again_is_left_alone(start):
    serving = await start(2)
    serving.workers[0].default = Script(fail_after=0)
    statuses = [(await serving.post(PATH, ASK)).status for _ in range(20)]
    assert statuses.count(500) == FAILURES
    metrics = (await serving.get("/metrics")).text
    assert 'dragoman_worker_ejections_total{engine="0",model_name="demo",reason="failures"} 1.0' in metrics
    assert 'dragoman_worker_ejections_total{engine="0",model_name="demo",reason="latency"} 0.0' in metrics


async def test_a_worker_that_does_not_greet_delays_no_other(start, sockets):
    serving = await start(1)
    release = asyncio.Event()

    async def mute(_, writer):
        await release.wait()
        writer.close()

    server = await asyncio.start_unix_server(mute, str(sockets / "mute.sock"))
    late = await FakeWorker(sockets / "late.sock", "demo/2").start()
    serving.workers.append(late)
    serving.publish([serving.worker, FakeWorker(sockets / "mute.sock", "demo/1"), late])
    await eventually(lambda: set(clients(serving)) == {"demo/0", "demo/2"})
    release.set()
    server.close()


async def test_an_unreachable_worker_is_tried_less_and_less_often_and_told_once(start, sockets, capsys):
    serving = await start(1)
    attempts = []

    async def hang_up(_, writer):
        attempts.append(1)
        writer.close()

    server = await asyncio.start_unix_server(hang_up, str(sockets / "gone.sock"))
    serving.publish([serving.worker, FakeWorker(sockets / "gone.sock", "demo/1")])
    await eventually(lambda: len(attempts) == 3)
    (backoff,) = serving.router._backoffs.values()
    await eventually(lambda: backoff._pause_s == 4 * FIRST_S)
    server.close()
    assert capsys.readouterr().out.count("worker not reachable") == 1
    serving.publish(serving.workers)
    await eventually(lambda: not serving.router._backoffs)
