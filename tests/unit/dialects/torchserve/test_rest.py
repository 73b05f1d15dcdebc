"""The REST twins of the services."""

from __future__ import annotations

import json

import pytest

from tests.unit.scripts import Script, ids, says
from tests.waiting import eventually

INFER, MANAGE, METRICS = "ts-inference", "ts-management", "ts-metrics"
HEADERS = {
    "pragma": "no-cache",
    "cache-control": "no-cache; no-store, must-revalidate, private",
    "expires": "Thu, 01 Jan 1970 00:00:00 UTC",
}


def error(status, kind, message):
    return status, {"code": status, "type": kind, "message": message}


async def ask(server, method, path, body=None, plane=MANAGE, **headers):
    answer = await server.serving.begin(path, body, plane=plane, method=method, **headers).end()
    return answer.status, answer.json()


async def test_ping(server):
    for method in ("GET", "POST"):
        answer = await server.serving.begin("/ping", plane=INFER, method=method).end()
        assert (answer.status, answer.text) == (200, '{\n  "status": "Healthy"\n}\n')
    assert {name: answer.header(name) for name in HEADERS} == HEADERS
    assert answer.header("x-request-id")
    server.serving.services.admission.draining = True
    assert (await server.serving.get("/ping", plane=INFER)).status == 500


class TestPredictions:
    async def test_bodies(self, server):
        server.worker.default = says(" of Spain")
        for path, body, headers in (
            ("/predictions/demo", b"The capital", {}),
            ("/predictions/demo/1.0", b"The capital", {"content_type": "text/plain"}),
            ("/predictions/demo?data=The+capital", b"", {}),
            (
                "/predictions/demo",
                b"data=The+capital&max_tokens=7",
                {"content_type": "application/x-www-form-urlencoded"},
            ),
            ("/models/demo/invoke", b"The capital", {}),
            ("/demo/predict", b"The capital", {}),
            ("/demo/1.0/predict", b"The capital", {}),
            ("/invocations?model_name=demo", b"The capital", {}),
            ("/invocations", b"The capital", {}),
        ):
            answer = await server.serving.post(path, body, plane=INFER, **headers)
            assert (answer.status, answer.text) == (200, " of Spain"), path
        assert server.worker.submits[3].params.max_tokens == 7

    async def test_a_form_with_files(self, server):
        server.worker.scripts.append(says(" of Spain"))
        parts = [
            b'--x\r\ncontent-disposition: form-data; name="data"; filename="a.txt"\r\n\r\nThe capital\r\n',
            b'--x\r\ncontent-disposition: form-data; name="max_tokens"\r\n\r\n5\r\n--x--\r\n',
        ]
        kind = "multipart/form-data; boundary=x"
        answer = await server.serving.post("/predictions/demo", b"".join(parts), plane=INFER, content_type=kind)
        assert (answer.status, answer.text) == (200, " of Spain")
        assert server.worker.submits[0].params.max_tokens == 5
        answer = await server.serving.post("/predictions/demo", b"--y", plane=INFER, content_type=kind)
        assert answer.status == 400

    async def test_json(self, server):
        server.worker.scripts.append(says(" of Spain"))
        found = await ask(server, "POST", "/predictions/demo", {"prompt": "The capital"}, INFER)
        assert found == (200, {"text": " of Spain", "finish_reason": "stop"})

    async def test_a_stream(self, server):
        server.worker.scripts += [says(" of Spain")] * 2
        call = server.serving.begin("/predictions/demo", {"prompt": "The capital", "stream": True}, plane=INFER)
        answer = await call.end()
        assert "".join(json.loads(chunk)["text"] for chunk in answer.chunks) == " of Spain"
        answer = await server.serving.post("/predictions/demo?stream=true", b"The capital", plane=INFER)
        assert (answer.text, len(answer.chunks) > 1) == (" of Spain", True)

    async def test_a_client_that_goes_stops_the_engine(self, server):
        server.worker.scripts.append(Script(tokens=ids(" of Spain"), gate_after=1))
        call = server.serving.begin("/predictions/demo", b"The capital", plane=INFER)
        await eventually(lambda: server.worker.submits)
        call.hang_up()
        await eventually(lambda: server.worker.aborted)

    @pytest.mark.parametrize(("path", "body", "expected"), [
        ("/predictions/X", b"a", error(404, "ModelNotFoundException", "Model not found: X")),
        ("/predictions/demo/7", b"a",
         error(404, "ModelVersionNotFoundException", "Model version: 7 does not exist for model: demo")),
        ("/predictions/demo", b"\xff",
         error(400, "InternalServerException", "input `body` is not valid UTF-8: this model reads text")),
        ("/predictions/demo/1.0/generate", b"a", error(404, "InternalServerException", "Unknown API endpoint: generate")),
        ("/explanations/demo", b"a", error(501, "InternalServerException", "explanations are not supported by this server")),
        ("/nothing", b"a", error(404, "ResourceNotFoundException",
                                 "Requested resource is not found, please refer to API document.")),
    ])  # fmt: skip
    async def test_refusals(self, server, path, body, expected):
        answer = await server.serving.post(path, body, plane=INFER)
        assert (answer.status, answer.json()) == expected
        assert answer.header("connection") == "close"
        assert answer.header("pragma") == "no-cache"

    async def test_without_workers(self, server):
        await server.manage("RegisterModel", url="densenet161.mar")
        status, body = await ask(server, "POST", "/predictions/densenet161", b"a", INFER)
        assert (status, body["type"]) == (503, "ServiceUnavailableException")
        server.serving.services.admission.max_concurrent_requests = 0
        status, body = await ask(server, "POST", "/predictions/demo", b"a", INFER)
        assert status == 503
        assert body["message"].startswith('Model "demo" has no worker to serve')


class TestOpenAI:
    async def test_below_a_version(self, server):
        server.worker.scripts.append(says("Madrid"))
        body = {"model": "demo", "messages": [{"role": "user", "content": "What?"}]}
        status, answer = await ask(server, "POST", "/predictions/demo/1.0/v1/chat/completions", body, INFER)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "Madrid")
        status, answer = await ask(server, "GET", "/predictions/demo/1.0/v1/models", None, INFER)
        assert (status, len(answer["data"])) == (200, 1)
        assert server.serving.services.admission.in_flight == 0

    async def test_a_stream(self, server):
        server.worker.scripts.append(says(" of Spain"))
        body = {"model": "demo", "prompt": "The capital", "stream": True}
        answer = await server.serving.post("/predictions/demo/1.0/v1/completions", body, plane=INFER)
        assert answer.events[-1] == "[DONE]"
        assert "".join(event["choices"][0]["text"] for event in answer.events[:-1]) == " of Spain"

    async def test_errors_are_openais(self, server):
        status, answer = await ask(
            server, "POST", "/predictions/demo/1.0/v1/completions", {"prompt": "a", "n": -1}, INFER
        )
        assert (status, answer["error"]["type"]) == (400, "BadRequestError")
        status, answer = await ask(server, "POST", "/predictions/demo/1.0/v1/load_lora_adapter", {}, INFER)
        assert (status, answer["message"]) == (404, "Unknown API endpoint: v1/load_lora_adapter")


class TestKServe:
    async def test_predict(self, server):
        server.worker.scripts += [says(" of Spain"), says(" of France")]
        body = {"instances": [{"data": "The capital"}, {"prompt": "The capital"}]}
        status, answer = await ask(server, "POST", "/v1/models/demo:predict", body, INFER)
        assert status == 200
        assert answer["predictions"] == [" of Spain", {"text": " of France", "finish_reason": "stop"}]
        for wrong in ({}, {"instances": []}, {"instances": 5}):
            assert (await ask(server, "POST", "/v1/models/demo:predict", wrong, INFER))[0] == 400

    async def test_infer(self, server):
        server.worker.scripts.append(says(" of Spain"))
        tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["The capital"]}
        body = {"id": "a", "inputs": [tensor]}
        status, answer = await ask(server, "POST", "/v2/models/demo/infer", body, INFER)
        assert (status, answer["outputs"][0]["data"]) == (200, [" of Spain"])
        assert (answer["model_name"], answer["model_version"], answer["id"]) == ("demo", "1.0", "a")
        assert "id" not in (await ask(server, "POST", "/v2/models/demo/infer", {"inputs": [tensor]}, INFER))[1]

    async def test_nothing_is_binary(self, server):
        server.worker.scripts.append(says(" of Spain"))
        tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["The capital"]}
        body = {
            "inputs": [{**tensor, "parameters": {"binary_data_size": 5}}],
            "outputs": [{"name": "text_output", "parameters": {"binary_data": True}}],
            "parameters": {"binary_data_output": True},
        }
        headers = {"inference_header_content_length": "5"}
        status, answer = await ask(server, "POST", "/v2/models/demo/infer", body, INFER, **headers)
        assert (status, answer["outputs"][0]["data"]) == (200, [" of Spain"])

    @pytest.mark.parametrize("body", [{}, {"inputs": 5}, {"inputs": [5]}, {"parameters": 5}, {"outputs": [{}]}])
    async def test_refused_requests(self, server, body):
        assert (await ask(server, "POST", "/v2/models/demo/infer", body, INFER))[0] == 400

    async def test_ready(self, server):
        assert await ask(server, "GET", "/v1/models/demo") == (200, {"name": "demo", "ready": True})
        assert (await ask(server, "GET", "/v1/models/X"))[0] == 404


class TestManagement:
    async def test_a_models_life(self, empty):
        said = 'Model "seven" Version: 1.0 registered with 0 initial workers. Use scale workers API to add workers for the model.'
        assert await ask(empty, "POST", "/models?url=demo.mar&model_name=seven") == (200, {"status": said})
        body = {"url": "demo.mar", "model_name": "eight", "initial_workers": "1", "batch_size": 4}
        said = 'Model "eight" Version: 1.0 registered with 1 initial workers'
        assert await ask(empty, "POST", "/models", body) == (200, {"status": said})
        assert await ask(empty, "PUT", "/models/seven?min_worker=1&synchronous=true") == (
            200, {"status": "Workers scaled to 1 for model: seven"})  # fmt: skip
        progress = {"status": "Processing worker updates..."}
        assert await ask(empty, "PUT", "/models/seven/1.0?min_worker=0") == (202, progress)
        assert empty.registry.states[0].workers == ()
        status, models = await ask(empty, "GET", "/models?limit=1")
        assert (status, models) == (
            200,
            {"nextPageToken": "1", "models": [{"modelName": "eight", "modelUrl": "demo.mar"}]},
        )
        status, (described,) = await ask(empty, "GET", "/models/eight/all?customized=true")
        assert (status, described["batchSize"]) == (200, 4)
        assert (await ask(empty, "PUT", "/models/eight/1.0/set-default"))[0] == 200
        assert await ask(empty, "DELETE", "/models/eight/1.0") == (200, {"status": 'Model "eight" unregistered'})
        assert await ask(empty, "DELETE", "/models/eight") == error(
            404, "ModelNotFoundException", "Model not found: eight"
        )

    @pytest.mark.parametrize(("method", "path", "expected"), [
        ("POST", "/models", error(400, "BadRequestException", "Parameter url is required.")),
        ("POST", "/models?url=", error(404, "ModelNotFoundException", "empty url")),
        ("POST", "/models?url=none.mar", error(404, "ModelNotFoundException", "Model not found at: none.mar")),
        ("POST", "/models?url=http://h/none.mar",
         error(400, "DownloadArchiveException", "Failed to download archive from: http://h/none.mar")),
        ("POST", "/models?url=demo.mar&model_name=demo",
         error(409, "ConflictStatusException", "Model version 1.0 is already registered for model demo")),
        ("PUT", "/models/demo?min_worker=2&max_worker=1",
         error(400, "BadRequestException", "max_worker cannot be less than min_worker.")),
        ("PUT", "/models/demo?min_worker=-1", None),
        ("PUT", "/models/demo/7/set-default",
         error(404, "ModelVersionNotFoundException", "Model version 7 does not exist for model demo")),
        ("GET", "/models/X", error(404, "ModelNotFoundException", "Model not found: X")),
        ("PATCH", "/models", error(405, "MethodNotAllowedException",
                                   "Requested method is not allowed, please refer to API document.")),
        ("GET", "/token?type=inference", error(404, "ResourceNotFoundException",
                                               "Requested resource is not found, please refer to API document.")),
    ])  # fmt: skip
    async def test_refusals(self, server, method, path, expected):
        found = await ask(server, method, path)
        assert found == expected if expected else found[0] == 400

    async def test_the_model_api_can_be_off(self, begin):
        server = await begin(model_api=False)
        expected = error(405, "MethodNotAllowedException", "Model API disabled")
        assert await ask(server, "POST", "/models?url=demo") == expected
        assert await ask(server, "DELETE", "/models/demo") == expected

    async def test_it_describes_itself(self, server):
        for plane, path in ((INFER, "/predictions/{model}"), (MANAGE, "/models")):
            status, document = await ask(server, "OPTIONS", "/", plane=plane)
            assert status == 200
            assert path in document["paths"]


async def test_metrics(server):
    await server.predict(data=b"The capital")
    await eventually(lambda: b"ts_inference_requests_total{" in server.state.metrics.render([]))
    text = (await server.serving.get("/metrics?name[]=ts_inference_requests_total", plane=METRICS)).text
    assert 'ts_inference_requests_total{model_name="demo",model_version="1.0",hostname="' in text
    assert text.endswith('"} 1.0\n')
    assert "latency" not in text
    text = (await server.serving.get("/metrics", plane=METRICS)).text
    assert "ts_queue_latency_microseconds{" in text
    assert "ts_inference_latency_microseconds{" in text
