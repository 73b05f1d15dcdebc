"""Whose a request is, how important, and until when: what reaches the worker, and what each dialect says when it is too late."""

from __future__ import annotations

import asyncio
import math

import pytest

from engine.failures import Failure, FailureCode
from engine.messages import Tenant
from management.snapshot import ApiKeyEntry, KeyLimits, hash_key
from tests.unit.scripts import Gate, Script, ids
from tests.unit.test_failures import DIALECTS
from tests.waiting import eventually

ASK = {"model": "demo", "prompt": "The capital"}
PATH = "/v1/completions"
FLOW, OBJECTIVE, TIMEOUT = "x_gateway_fairness_id", "x_gateway_inference_objective", "x_request_timeout"
OBJECTIVES = {"critical": 10, "batch": -10}


async def keyed(start, **limits):
    serving = await start(api_key_required=True, objectives=OBJECTIVES)
    scopes = frozenset({"infer"})
    serving.keys = {"k1": ApiKeyEntry("k1", "k1", hash_key("k1.s"), scopes, None, limits=KeyLimits(**limits))}
    serving.publish()
    return serving


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_every_dialect_passes_it_on(start, dialect):
    serving = await keyed(start, weight=2.5)
    plane, path, body = DIALECTS[dialect]
    headers = {FLOW: "team-a", OBJECTIVE: "critical", TIMEOUT: "5", "authorization": "Bearer k1.s"}
    assert (await serving.post(path, body, plane=plane, **headers)).status == 200
    submit = serving.worker.submits[0]
    assert (submit.tenant, submit.band) == (Tenant("k1", "team-a", 2.5), 10)
    assert 0 < submit.timeout_s <= 5


async def test_without_a_key_the_flow_is_the_tenant(serving):
    await serving.post(PATH, ASK, **{FLOW: "team-a"})
    await serving.post(PATH, ASK)
    assert [s.tenant for s in serving.worker.submits] == [Tenant("", "team-a"), Tenant()]
    assert serving.worker.submits[1].timeout_s == pytest.approx(600, abs=60)


async def test_unknown_objectives_are_ordinary(start):
    serving = await start(objectives=OBJECTIVES)
    for name in ("batch", "nothing", ""):
        await serving.post(PATH, ASK, **{OBJECTIVE: name})
    assert [s.band for s in serving.worker.submits] == [-10, 0, 0]


async def test_a_client_cannot_ask_for_more_time_than_there_is(start):
    serving = await start(request_timeout_s=30)
    await serving.post(PATH, ASK, **{TIMEOUT: "9999"})
    assert serving.worker.submits[0].timeout_s <= 30


@pytest.mark.parametrize(("header", "value"), [
    (TIMEOUT, "0"), (TIMEOUT, "-1"), (TIMEOUT, "soon"), (TIMEOUT, "nan"), (TIMEOUT, "inf"), (TIMEOUT, ""),
    (FLOW, ""), (FLOW, "x" * 129), (FLOW, "a\x01b"), (FLOW, "\xe4"),
])  # fmt: skip
async def test_bad_headers_are_named(serving, header, value):
    answer = await serving.post(PATH, ASK, **{header: value})
    assert (answer.status, answer.json()["error"]["param"]) == (400, header.replace("_", "-"))
    assert not serving.worker.submits


async def test_flows_share_permits_where_there_are_no_keys(start):
    serving = await start(max_concurrent_requests=4, max_requests_per_tenant=1)
    gate = Gate()
    serving.worker.scripts.append(Script(tokens=ids(" of Spain"), gate_after=1, gate=gate))
    first = serving.begin(PATH, ASK, **{FLOW: "a"})
    await gate.reached.wait()
    assert (await serving.post(PATH, ASK, **{FLOW: "a"})).status == 429
    early = serving.planes["front"].overloaded("POST", PATH, {b"x-gateway-fairness-id": b"a"})
    assert early.status == 429
    assert (await serving.post(PATH, ASK, **{FLOW: "b"})).status == 200
    gate.open()
    assert (await first.end()).status == 200


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("code", "reason"), [
    (FailureCode.OVERLOADED, "overloaded"), (FailureCode.OVER_SHARE, "share"), (FailureCode.TOO_LATE, "deadline"),
])  # fmt: skip
async def test_every_dialect_says_when_to_come_again(serving, dialect, code, reason):
    plane, path, body = DIALECTS[dialect]
    serving.worker.default = Script(fail_after=0, failure=Failure(code, {"wait_ms": 7500}))
    answer = await serving.post(path, body, plane=plane)
    assert answer.status == (429 if dialect == "tgi" or code is FailureCode.OVER_SHARE else 503)
    assert (answer.header("retry-after"), answer.header("retry-after-ms")) == ("8", "7500")
    metrics = serving.services.metrics.render().decode()
    assert f'dragoman_refusals_total{{reason="{reason}"}} 1.0' in metrics


@pytest.mark.parametrize(("code", "workers_asked"), [(FailureCode.OVER_SHARE, 2), (FailureCode.TOO_LATE, 1)])
async def test_another_worker_may_have_room_but_not_more_time(start, code, workers_asked):
    serving = await start(2)
    for worker in serving.workers:
        worker.default = Script(fail_after=0, failure=Failure(code))
    answer = await serving.post(PATH, ASK)
    assert answer.status in (429, 503)
    assert sum(len(worker.submits) for worker in serving.workers) == workers_asked


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_poisonous_request_is_not_to_be_sent_again(serving, dialect):
    plane, path, body = DIALECTS[dialect]
    serving.worker.default = Script(fail_after=0, failure=Failure(FailureCode.POISONOUS))
    assert (await serving.post(path, body, plane=plane)).header("x-should-retry") == "false"


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_token_that_does_not_come_ends_the_request(start, dialect):
    serving = await start(token_timeout_s=0.2)
    plane, path, body = DIALECTS[dialect]
    serving.worker.scripts.append(Script(tokens=ids(" of Spain"), gate_after=1, gate=Gate()))
    answer = await serving.post(path, body, plane=plane)
    assert answer.status == {"tgi": 424, "triton": 503, "mindie": 500}.get(dialect, 504)
    await eventually(lambda: bool(serving.worker.aborted))
    assert serving.services.admission.in_flight == 0


async def test_a_slow_reader_is_no_stall(start):
    serving = await start(token_timeout_s=0.2)
    call = serving.begin(PATH, {**ASK, "stream": True})
    await call.chunks(1)
    call.read_no_more()
    await asyncio.sleep(0.5)
    call.read_on()
    assert (await call.end()).events[-1] == "[DONE]"
    assert "error" not in call.answer.text


async def test_the_first_token_may_take_as_long_as_the_deadline_lets_it(start):
    serving = await start(token_timeout_s=0.05)
    gate = Gate()
    serving.worker.scripts.append(Script(tokens=ids(" of Spain"), per_step=99, gate_after=0, gate=gate))
    call = serving.begin(PATH, ASK)
    await gate.reached.wait()
    await asyncio.sleep(0.3)
    gate.open()
    assert (await call.end()).status == 200


def test_a_standing_without_a_deadline_is_as_patient_as_the_server():
    from inference.admission.standing import ANYBODY

    assert ANYBODY.deadline == math.inf
    assert ANYBODY.within(7.0) == 7.0
