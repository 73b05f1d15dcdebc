"""The load of a deployment, as its front door measures it."""

from __future__ import annotations

from inference.metrics import load
from inference.metrics.load import LoadRecorder
from inference.workers.holding import HoldQueue
from tests.unit.scripts import Gate, Script, ids
from tests.unit.serving import eventually

BODY = {"prompt": [5, 6], "max_tokens": 3}


def recorder(serving) -> LoadRecorder:
    made = LoadRecorder("web", serving.router, HoldQueue())
    serving.services.generator.observers.append(made)
    return made


def load_of(made: LoadRecorder):
    made.refresh()
    (report,) = made.reports()
    return report.deployments[""]


async def test_it_works(start):
    serving = await start()
    made = recorder(serving)
    for _ in range(3):
        assert (await serving.post("/v1/completions", BODY)).status == 200
    load = load_of(made)
    (piece,) = load.slices
    assert (piece.arrivals, piece.first_tokens, piece.completions) == (3, 3, 3)
    assert 0 < piece.ttft_total_s <= piece.e2e_total_s
    assert (load.gauges.running, load.gauges.waiting, load.gauges.held) == (0, 0, 0)
    assert load.gauges.last_activity_at is not None
    assert load_of(made).slices == (piece,)  # a later report repeats it


async def test_a_client_that_leaves_is_no_completion_and_leaves_no_gauge(start):
    serving = await start()
    made = recorder(serving)
    serving.worker.scripts.append(Script(tokens=ids("a b c"), gate_after=1, gate=Gate()))
    call = serving.begin("/v1/completions", BODY)
    await eventually(lambda: load_of(made).gauges.running == 1)
    call.hang_up()
    await eventually(lambda: load_of(made).gauges.running == 0)
    assert sum(piece.completions for piece in load_of(made).slices) == 0
    assert sum(piece.arrivals for piece in load_of(made).slices) == 1


async def test_who_waited_for_a_first_worker_counts_no_first_token(start):
    serving = await start()
    made = recorder(serving)
    generator = serving.services.generator
    original = generator.router.hold

    async def held(target, tenant, timeout_s):
        await original(target, tenant, timeout_s)
        return True

    generator.router.hold = held
    assert (await serving.post("/v1/completions", BODY)).status == 200
    (piece,) = load_of(made).slices
    assert (piece.arrivals, piece.first_tokens, piece.completions) == (1, 0, 1)


async def test_refused_requests_are_load_too(start):
    serving = await start()
    made = recorder(serving)
    made.rejected("")
    (piece,) = load_of(made).slices
    assert (piece.arrivals, piece.rejected) == (0, 1)


async def test_a_deployment_that_has_gone_is_forgotten(start, monkeypatch):
    serving = await start()
    made = recorder(serving)
    made.rejected("gone")
    made.refresh()
    assert set(made.reports()[0].deployments) == {"", "gone"}
    monkeypatch.setattr(load, "FORGOTTEN_AFTER_S", -1.0)
    for _ in range(2):
        made.refresh()
    assert set(made.reports()[0].deployments) == {""}
