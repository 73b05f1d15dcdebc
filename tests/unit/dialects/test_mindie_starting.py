"""MindIE's planes while a model's first worker starts: a second model is ready, and so the service is healthy."""

from __future__ import annotations

import re

import pytest

from inference.dialects.mindie.settings import MindieSettings
from management.snapshot import Availability
from tests.unit.second_model import Second
from tests.waiting import eventually

GENERATE = "/v2/models/second/generate"
ASK = {"text_input": "The capital", "parameters": {"max_new_tokens": 2}}


async def counters(serving):
    """The numbers of `request_*_total`, of which there is one series each."""
    text = (await serving.get("/metrics", plane="metrics")).text
    found = re.findall(r"(?m)^request_(\w+)_total\{model_name=\"(.*)\"\} (.*)$", text)
    assert len(found) == 3
    assert len({model for _, model, _ in found}) == 1
    return {name: float(number) for name, _, number in found}


@pytest.fixture
async def serving(start):
    return await start(mindie=MindieSettings(metrics_enabled=True))


@pytest.fixture
async def second(serving, sockets):
    made = Second(serving, sockets)
    made.publish()
    yield made
    await made.close()


@pytest.mark.parametrize("name", ["second", "base"])
async def test_a_request_waits_for_the_first_worker(serving, second, name):
    call = serving.begin(f"/v2/models/{name}/generate", ASK, plane="mindie")
    await eventually(lambda: serving.router.holding.deployments or call.task.done())
    assert not call.task.done(), call.answer
    await second.start()
    answer = await call.end()
    assert (answer.status, answer.json()["model_name"]) == (200, "second")
    assert await counters(serving) == {"received": 1, "success": 1, "failed": 0}


async def test_a_request_that_waits_in_vain_has_failed(serving, second):
    call = serving.begin(GENERATE, ASK, plane="mindie")
    await eventually(lambda: serving.router.holding.deployments)
    assert await counters(serving) == {"received": 1, "success": 0, "failed": 0}
    second.publish(Availability.FAILED)
    assert (await call.end()).status == 500
    assert await counters(serving) == {"received": 1, "success": 0, "failed": 1}


async def test_counters_go_on_as_models_come(serving, second):
    await serving.post("/infer", {"inputs": "The capital"}, plane="mindie")
    before = await counters(serving)
    await second.start()
    assert await counters(serving) == before == {"received": 1, "success": 1, "failed": 0}


NO_STATUS = b'{"error":"Failed to get health status.","error_type":"Incomplete Generation"}'
NOT_STARTED = (
    b'{"error":"Failed to enqueue inferRequest. No available LlmManager.","error_type":"Incomplete Generation"}'
)


@pytest.mark.parametrize(("plane", "path", "body"), [
    ("management", "/v2/models/second/ready", NO_STATUS),
    ("management", "/v2/models/second/getSlotCount", b""),
    ("mindie", "/v2/models/second", NOT_STARTED),
    ("mindie", "/v2/models/second/config", NOT_STARTED),
])  # fmt: skip
async def test_queries_answer_at_once(serving, second, plane, path, body):
    answer = await serving.get(path, plane=plane)
    assert (answer.status, answer.body) == (500, body)
    await second.start()
    assert (await serving.get(path, plane=plane)).status == 200


async def test_a_model_that_cannot_start_is_not_unknown(serving, second):
    second.publish(Availability.FAILED)
    answer = await serving.post(GENERATE, ASK, plane="mindie")
    assert (answer.status, answer.json()["error_type"]) == (500, "Incomplete Generation")
    assert (await serving.post(GENERATE.replace("second", "third"), ASK, plane="mindie")).status == 404


async def test_no_request_of_it_runs_that_could_be_stopped(serving, second):
    answer = await serving.post("/v2/models/second/stopInfer", {"id": "a"}, plane="mindie")
    assert (answer.status, answer.json()["error"]) == (404, "RequestId is a not found.")
