"""Results that are polled."""

from __future__ import annotations

import pytest

from engine.failures import FinishReason
from inference.dialects.djl import results
from tests.unit.dialects.djl.test_inference import lines
from tests.unit.scripts import Gate, Script, ids, says
from tests.waiting import eventually

ASK = {"inputs": "Hello"}


async def test_results_are_polled(djl):
    gate = Gate()
    djl.worker.scripts.append(says("one two three", gate_after=1, gate=gate))
    begun = await djl.post("/predictions/demo", {**ASK, "stream": True}, x_synchronous="false")
    token = begun.header("x-next-token")
    assert (begun.status, begun.text) == (200, "")
    assert begun.header("x-amzn-sagemaker-custom-attributes") == f"x-next-token={token}"
    await eventually(lambda: len(next(iter(djl.state.results._results.values())).chunks) == 1)
    first = await djl.post("/predictions/demo", x_starting_token=token, x_max_items="1")
    assert (first.status, len(lines(first))) == (200, 1)
    later = first.header("x-next-token")
    pending = await djl.post("/predictions/demo", x_starting_token=later)
    assert (pending.status, pending.text, pending.header("x-next-token")) == (202, "", later)
    gate.open()
    await eventually(lambda: next(iter(djl.state.results._results.values())).ended is not None)
    rest = await djl.post("/predictions/demo", x_starting_token=later)
    assert (rest.status, rest.header("x-next-token")) == (200, None)
    assert lines(rest)[-1]["generated_text"] == "one two three"
    again = await djl.post("/predictions/demo", x_starting_token=token)
    assert again.text == first.text + rest.text
    djl.now = 601.0
    text = f"Invalid x-starting-token: {token}"
    await djl.refused("POST", "/predictions/demo", 400, "BadRequestException", text, x_starting_token=token)


async def test_a_failed_request_is_a_result(djl):
    djl.worker.scripts.append(Script(tokens=ids("one"), fail_after=1, finish=FinishReason.STOP))
    for body, status in ((ASK, 424), ({"inputs": 7}, 424)):
        begun = await djl.post("/invocations", body, x_synchronous="false")
        await eventually(lambda: all(r.ended is not None for r in djl.state.results._results.values()))
        answer = await djl.post("/invocations", x_starting_token=begun.header("x-next-token"))
        assert (answer.status, answer.json()["code"]) == (status, status)


@pytest.mark.parametrize("token", ["", "x", "0" * 32, "0" * 32 + ".x", "/etc/passwd", "0" * 32 + "." + "9" * 40])
async def test_unknown_results(djl, token):
    answer = await djl.post("/invocations", x_starting_token=token)
    assert (answer.status, answer.json()["type"]) == (400, "BadRequestException")


async def test_results_are_bounded_and_belong_to_a_key(djl):
    for _ in range(64):
        assert (await djl.post("/invocations", ASK, x_synchronous="false")).status == 200
    refused = await djl.post("/invocations", ASK, x_synchronous="false")
    assert (refused.status, refused.json()["type"]) == (503, "WlmCapacityException")
    assert (await djl.post("/invocations", ASK, x_synchronous="perhaps")).status == 400
    name, result = next(iter(djl.state.results._results.items()))
    result.tenant = "another"
    assert (await djl.post("/invocations", x_starting_token=name)).status == 400


async def test_a_result_may_be_too_large(djl, monkeypatch):
    for limit in ("MAX_BYTES", "MAX_TOTAL_BYTES"):
        with monkeypatch.context() as patched:
            patched.setattr(results, limit, 10)
            begun = await djl.post("/invocations", {**ASK, "stream": True}, x_synchronous="false")
            await eventually(lambda: all(r.ended is not None for r in djl.state.results._results.values()))
        answer = await djl.post("/invocations", x_starting_token=begun.header("x-next-token"))
        assert "result" in answer.text
        assert answer.header("x-next-token") is None
    assert djl.services.admission.in_flight == 0


async def test_results_that_were_returned_make_room(djl):
    for _ in range(70):
        begun = await djl.post("/invocations", ASK, x_synchronous="false")
        assert begun.status == 200
        await eventually(lambda: all(r.ended is not None for r in djl.state.results._results.values()))
        assert (await djl.post("/invocations", x_starting_token=begun.header("x-next-token"))).status == 200
    assert len(djl.state.results._results) == 64


async def test_a_poll_needs_no_place(djl):
    begun = await djl.post("/invocations", ASK, x_synchronous="false")
    await eventually(lambda: all(r.ended is not None for r in djl.state.results._results.values()))
    token = begun.header("x-next-token")
    plane = djl.serving.planes["djl"]
    djl.services.admission.max_concurrent_requests = 1
    with djl.services.admission.permit("another"):
        for name, value in (
            (b"x-starting-token", token),
            (b"x-amzn-sagemaker-custom-attributes", f"x-starting-token={token}"),
        ):
            assert plane.overloaded("POST", "/invocations", {name: value.encode()}) is None
        assert plane.overloaded("POST", "/invocations", {}) is not None
        assert (await djl.post("/invocations", x_starting_token=token)).status == 200


async def test_a_result_that_is_too_large_has_the_errors_status(djl, monkeypatch):
    monkeypatch.setattr(results, "MAX_BYTES", 10)
    begun = await djl.post("/invocations", ASK, x_synchronous="false")
    await eventually(lambda: all(r.ended is not None for r in djl.state.results._results.values()))
    answer = await djl.post("/invocations", x_starting_token=begun.header("x-next-token"))
    assert answer.status >= 500, answer.text
