"""Places: how many requests may be inside, whose they are, and what a drain refuses."""

from __future__ import annotations

import pytest

from inference.admission.permits import Admission
from inference.errors import Overloaded, ShuttingDown
from tests.unit.scripts import Gate, Script, ids
from tests.unit.test_failures import DIALECTS
from tests.waiting import eventually

ASK = {"model": "demo", "prompt": "The capital"}


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_full_server_refuses_and_then_serves_again(start, dialect):
    serving = await start(max_concurrent_requests=1)
    plane, path, body = DIALECTS[dialect]
    gate = Gate()
    serving.worker.scripts.append(Script(tokens=ids(" of Spain"), gate_after=1, gate=gate))
    first = serving.begin("/v1/completions", ASK)
    await gate.reached.wait()
    refused = await serving.post(path, body, plane=plane)
    assert refused.status == (429 if dialect == "tgi" else 503)
    assert refused.header("retry-after") == "1"
    gate.open()
    assert (await first.end()).status == 200
    assert (await serving.post(path, body, plane=plane)).status == 200
    assert serving.services.admission.in_flight == 0


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_drain_refuses(serving, dialect):
    plane, path, body = DIALECTS[dialect]
    serving.services.admission.draining = True
    assert (await serving.post(path, body, plane=plane)).status == (429 if dialect == "tgi" else 503)
    assert not serving.worker.submits


@pytest.mark.parametrize("path", ["/health", "/ping", "/v2/health/ready"])
async def test_health_follows_the_workers_and_the_drain(serving, path):
    assert (await serving.get(path)).status == 200
    serving.worker.die()
    await eventually(lambda: not serving.router.ready)
    assert (await serving.get(path)).status >= 400


def test_one_tenant_leaves_room_for_others():
    admission = Admission(4)
    with admission.permit("a"), admission.permit("a"), admission.permit("a"):
        with pytest.raises(Overloaded):
            admission.check("a")
        with admission.permit("b"):
            assert admission.in_flight == 4
            with pytest.raises(Overloaded):
                admission.check("c")
        admission.check("b")
    assert (admission.in_flight, admission.crowded) == (0, False)


def test_nobody_in_particular_shares_with_nobody():
    admission = Admission(4, 1)
    with admission.permit(""), admission.permit(""), admission.permit("a"):
        assert admission.in_flight == 3
        with pytest.raises(Overloaded):
            admission.check("a")


def test_crowded_is_true_as_soon_as_anybody_may_be_refused():
    admission = Admission(4)
    with admission.permit(), admission.permit():
        assert not admission.crowded
        with admission.permit():
            assert admission.crowded
    admission.draining = True
    assert admission.crowded
    with pytest.raises(ShuttingDown):
        admission.check()


async def test_places_come_back_after_errors(start):
    serving = await start(max_concurrent_requests=1)
    for _ in range(3):
        assert (await serving.post("/v1/completions", {**ASK, "temperature": 99})).status == 400
        serving.worker.scripts.append(Script(fail_after=0))
        assert (await serving.post("/v1/completions", ASK)).status == 500
    assert (await serving.post("/v1/completions", ASK)).status == 200
