"""The general management API: models, workflows, health, logging, metrics."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tests.unit.fake_worker import FakeWorker
from tests.waiting import eventually

BAD = "BadRequestException"


@pytest.fixture
def models(djl):
    """Sources of two models."""
    djl.registry.sources = {"/models/one", "org/two"}
    return djl


@pytest.mark.parametrize(
    ("query", "body", "name"),
    [
        ("?url=/models/one&model_name=m&min_worker=0", None, "m"),
        ("?url=file:///models/one&min_worker=0", None, "one"),
        ("?url=org/two&min_worker=0", None, "two"),
        ("", {"url": "/models/one", "model_name": "m", "min_worker": 0, "synchronous": True}, "m"),
    ],
)
async def test_register_and_unregister(models, query, body, name):
    answer = await models.post(f"/models{query}", body)
    assert (answer.status, answer.json()) == (200, {"status": f'Model "{name}" registered.'})
    listed = (await models.get("/models")).json()["models"]
    source = "org/two" if name == "two" else "/models/one"
    assert {"modelName": name, "version": "1.0", "modelUrl": source, "status": "PENDING"} in listed
    answer = await models.call("DELETE", f"/models/{name}")
    assert (answer.status, answer.json()) == (200, {"status": f'Model or workflow "{name}" unregistered'})
    text = f"Model or workflow not found: {name}"
    await models.refused("DELETE", f"/models/{name}", 404, "ModelNotFoundException", text)
    await models.refused("GET", f"/models/{name}", 404, "ModelNotFoundException", f"Workflow not found: {name}")


async def test_registered_twice_and_as_another_version(models):
    path = "/models?url=/models/one&model_name=m&min_worker=0"
    assert (await models.post(path)).status == 200
    await models.refused("POST", path, 409, "BadRequestException", "Workflow m is already registered.")
    other = path.replace("/models/one", "org/two")
    await models.refused("POST", other, 409, "BadRequestException", "Workflow m is already registered.")
    assert (await models.post(f"{path}&model_version=2.0")).status == 200
    described = (await models.get("/models/m")).json()
    assert [(each["workflowName"], each["version"]) for each in described] == [("m", "1.0"), ("m", "2.0")]
    assert [each["version"] for each in (await models.get("/models/m/2.0")).json()] == ["2.0"]
    await models.refused("GET", "/models/m/3", 404, "ModelNotFoundException", "Workflow not found: m/3")
    assert (await models.call("DELETE", "/models/m/2.0")).status == 200
    assert len((await models.get("/workflows/m")).json()) == 1


async def test_figures_are_returned(models):
    figures = "batch_size=4&max_batch_delay=5&max_idle_time=6&job_queue_size=7&engine=Python&device=cpu"
    await models.post(f"/models?url=/models/one&model_name=m&min_worker=0&max_worker=3&{figures}")
    (described,) = (await models.get("/models/m")).json()
    (model,) = described["models"]
    assert {key: model[key] for key in ("batchSize", "maxBatchDelayMillis", "maxIdleSeconds", "queueSize")} == {
        "batchSize": 4, "maxBatchDelayMillis": 5, "maxIdleSeconds": 6, "queueSize": 7,
    }  # fmt: skip
    assert (model["loadedAtStartup"], model["status"]) == (False, "PENDING")
    (group,) = model["workerGroups"]
    assert (group["minWorkers"], group["maxWorkers"], group["workers"]) == (0, 3, [])


async def test_describe_a_startup_model(models):
    (described,) = (await models.get("/models/demo")).json()
    (model,) = described["models"]
    assert (model["loadedAtStartup"], model["status"], model["modelUrl"]) == (True, "Healthy", "/models/demo")
    assert (model["batchSize"], model["queueSize"], model["requestInQueue"]) == (1, 1000, 0)
    (group,) = model["workerGroups"]
    assert group["device"] == {"deviceType": "cpu", "deviceId": -1}
    assert group["workers"] == [{"id": 1, "startTime": "2023-11-14T22:13:20.000+00:00", "status": "READY"}]


async def test_scaling(models):
    answer = await models.call("PUT", "/models/demo?min_worker=2&max_worker=4")
    text = 'Workflow "demo" worker scaled. New Worker configuration min workers:2 max workers:4'
    assert (answer.status, answer.json()) == (200, {"status": text})
    for query, limits in (("min_worker=5", (5, 5)), ("max_worker=1", (1, 1)), ("min_worker=0", (0, 1)), ("", (0, 1))):
        assert (await models.call("PUT", f"/models/demo/1.0?{query}&min_worker=")).status == 200
        state = models.registry.deployed["demo"].state
        assert (state.min_workers, state.max_workers) == limits
    for query, text in (
        ("min_worker=2&max_worker=1", "max_worker cannot be less than min_worker."),
        ("min_worker=-3", "Parameter min_worker must not be negative."),
        ("min_worker=x", 'parameter is invalid number.For input string: "x"'),
        ("max_worker=99999999999", 'parameter is invalid number.For input string: "99999999999"'),
    ):
        await models.refused("PUT", f"/models/demo?{query}", 400, BAD, text)
    text = "Model or workflow not found: none"
    await models.refused("PUT", "/models/none?min_worker=1", 404, "ModelNotFoundException", text)
    models.registry.add("late", [], state="starting")
    text = "Model or workflow is not ready: late"
    await models.refused("PUT", "/models/late?min_worker=1", 503, "ServiceUnavailableException", text)


async def test_a_registration_waits_for_the_workers(models, sockets):
    models.registry.starts_as = "starting"
    running = models.serving.begin("/models?url=/models/one&model_name=m", plane="djl")
    await eventually(lambda: "m" in models.registry.deployed)
    assert models.registry.created[0].workers == 1
    worker = await FakeWorker(sockets / "m.sock", "m/0").start()
    models.registry.add("m", [worker])
    assert (await running.end()).json() == {"status": 'Model "m" registered.'}
    await worker.close()
    answer = await models.post("/models?url=org/two&synchronous=false")
    assert (answer.status, answer.json()) == (202, {"status": 'Model "two" registration scheduled.'})


async def test_a_model_that_cannot_start_is_not_kept(models):
    models.registry.starts_as, models.registry.reason = "failed", "this model is none"
    text = "The model could not be started: this model is none"
    await models.refused("POST", "/models?url=/models/one", 400, "ModelException", text)
    assert [each["modelName"] for each in (await models.get("/models")).json()["models"]] == ["demo"]


async def test_a_model_that_cannot_start_is_not_kept_after_its_client_has_left(models):
    models.registry.starts_as = "starting"
    running = models.serving.begin("/models?url=/models/one&model_name=m", plane="djl")
    await eventually(lambda: "m" in models.registry.deployed)
    running.hang_up()
    await running.end()
    assert "m" in models.registry.deployed
    models.registry.add("m", [], state="failed")
    await eventually(lambda: "m" not in models.registry.deployed)


async def test_another_model_of_the_name_is_kept(models):
    """The client's model is removed, and the name registered again."""
    models.registry.starts_as = "starting"
    running = models.serving.begin("/models?url=/models/one&model_name=m", plane="djl")
    await eventually(lambda: "m" in models.registry.deployed)
    models.registry.add("m", [], state="failed", public_id="another")
    answer = await running.end()
    assert (answer.status, answer.json()["message"]) == (400, "The model could not be started: m was removed")
    assert "m" in models.registry.deployed


async def test_a_server_that_drains_waits_for_no_start_whose_client_has_left(models):
    models.registry.starts_as = "starting"
    before = asyncio.all_tasks()
    running = models.serving.begin("/models?url=/models/one&model_name=m", plane="djl")
    await eventually(lambda: "m" in models.registry.deployed)
    running.hang_up()
    await running.end()
    (waiting,) = asyncio.all_tasks() - before
    models.services.lasting.end()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    assert "m" in models.registry.deployed


@pytest.mark.parametrize(
    ("query", "status", "kind", "words"),
    [
        ("", 400, BAD, "Parameter url is required."),
        ("url=", 400, BAD, "Parameter url is required."),
        ("url=file://[m", 400, BAD, "This server downloads nothing: file URLs are not supported."),
        ("url=s3://bucket/m", 400, BAD, "This server downloads nothing: s3 URLs are not supported."),
        ("url=file://host/m", 400, BAD, "This server downloads nothing"),
        ("url=/no", 404, "ModelNotFoundException", "The model was not found at /no"),
        ("url=/models/one&min_worker=2&max_worker=1", 400, BAD, "max_worker cannot be less than min_worker."),
        ("url=/models/one&batch_size=many", 400, BAD, "parameter is invalid number."),
        ("url=/models/one&synchronous=perhaps", 400, BAD, "The parameter synchronous must be true or false"),
    ],
)
async def test_models_that_cannot_be_registered(models, query, status, kind, words):
    answer = await models.post(f"/models?{query}")
    assert (answer.status, answer.json()["type"]) == (status, kind)
    assert answer.json()["message"].startswith(words)
    assert list(models.registry.deployed) == ["demo"]


async def test_lists_and_pages(models):
    for name in ("c", "a", "b"):
        models.registry.add(name, [])
    names = [each["modelName"] for each in (await models.get("/models")).json()["models"]]
    assert names == ["a", "b", "c", "demo"]
    page = (await models.get("/models?limit=2")).json()
    assert (page["nextPageToken"], len(page["models"])) == ("2", 2)
    page = (await models.get("/workflows?limit=3&next_page_token=3")).json()
    assert page == {"nextPageToken": "4", "workflows": [{"workflowName": "demo", "version": "1.0"}]}
    answer = await models.get("/models?limit=x")
    assert (answer.status, answer.json()["type"]) == (409, "NumberFormatException")


async def test_workflows_cannot_be_registered(models):
    answer = await models.post("/workflows?template=adapter&adapter=a&url=x&model=demo")
    assert (answer.status, answer.json()["type"]) == (400, BAD)
    assert "POST /models" in answer.json()["message"]
    await models.refused("POST", "/workflows?model=demo", 400, BAD, "Either parameter url or template is required.")


async def test_ping(models):
    answer = await models.get("/ping")
    assert (answer.status, answer.json()) == (200, {"demo": {"status": "Healthy"}})
    models.registry.add("late", [], state="starting")
    answer = await models.get("/ping")
    assert (answer.status, answer.json()["late"]) == (200, {"status": "PENDING"})
    models.registry.add("broken", [], state="failed")
    answer = await models.get("/ping")
    assert (answer.status, answer.json()["broken"]) == (500, {"status": "FAILED"})
    models.services.admission.draining = True
    assert (await models.get("/ping")).status == 503


async def test_logging_and_metrics(models):
    before = logging.getLogger().level
    try:
        for level, expected in (("trace", logging.DEBUG), ("WARN", logging.WARNING), ("", logging.INFO)):
            assert (await models.post(f"/server/logging?level={level}")).json() == {"status": "OK"}
            assert logging.getLogger().level == expected
        assert (await models.post("/server/logging?level=loud")).status == 400
    finally:
        logging.getLogger().setLevel(before)
    answer = await models.get("/server/metrics?name[]=x")
    assert answer.header("content-type").startswith("text/plain")
    assert "# TYPE" in answer.text
    assert (await models.call("OPTIONS", "/")).text == "{}\n"
