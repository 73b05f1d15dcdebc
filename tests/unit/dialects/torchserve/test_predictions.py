"""Predictions and their streams over gRPC."""

from __future__ import annotations

import asyncio
import json

import grpc
import pytest

from engine.failures import Failure, FailureCode, FinishReason
from inference.workers.registry import NewDeployment
from management.snapshot import AdapterEntry
from tests.unit.scripts import Gate, Script, ids, says
from tests.waiting import eventually

NO_WORKER = (
    "has no worker to serve inference request. Please use scale workers API to add workers. If this is a sequence "
)
KITTEN = b"\xff\xd8\xff\xe0\x00\x10JFIF"


async def refused(call) -> tuple[str, list[str]]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code().name, caught.value.details().split("\n")


async def test_text_in_text_out(server):
    server.worker.scripts.append(says(" of Spain"))
    assert await server.predict(data=b"The capital") == b" of Spain"
    submit = server.worker.submits[0]
    assert submit.params.max_tokens == 256
    assert server.serving.services.admission.in_flight == 0


async def test_body_is_read_where_there_is_no_data(server):
    server.worker.scripts += [says(" of Spain")] * 2
    assert await server.predict(body=b"The capital") == b" of Spain"
    assert json.loads(await server.predict(prompt=b"The capital"))["text"] == " of Spain"


async def test_json_in_json_out(server):
    server.worker.scripts.append(says(" of Spain"))
    body = {"prompt": "The capital", "max_new_tokens": 9, "temperature": 0, "stop": ["x"], "unknown": 1}
    answer = await server.predict(data=json.dumps(body).encode())
    assert answer == b'{\n  "text": " of Spain",\n  "finish_reason": "stop"\n}'
    params = server.worker.submits[0].params
    assert (params.max_tokens, params.temperature) == (9, 0.0)


async def test_further_values_override(server):
    server.worker.scripts += [says(" of Spain")] * 3
    await server.predict(data=b'{"prompt": "a b", "max_tokens": 9}', max_tokens=b"5", temperature=b"0.5", seed=b"7")
    params = server.worker.submits[0].params
    assert (params.max_tokens, params.temperature, params.seed) == (5, 0.5, 7)
    assert await server.predict(data=b"The capital", max_new_tokens=b"4") != b""
    assert server.worker.submits[1].params.max_tokens == 4
    await server.predict(data=b'{"prompt": "a b", "max_tokens": 9}', max_new_tokens=b"6")
    assert server.worker.submits[2].params.max_tokens == 6


async def test_a_conversation(server):
    server.worker.scripts.append(says("Madrid"))
    body = {"messages": [{"role": "user", "content": "What is the capital of Spain?"}]}
    assert json.loads(await server.predict(data=json.dumps(body).encode()))["text"] == "Madrid"


async def test_a_brace_may_begin_a_text(server):
    server.worker.scripts.append(says(" of Spain"))
    assert await server.predict(data=b"{name}, the capital") == b" of Spain"


@pytest.mark.parametrize(("values", "code", "text"), [
    ({"data": KITTEN}, "INVALID_ARGUMENT", "input `data` is not valid UTF-8: this model reads text"),
    ({"data": b"a", "stop": KITTEN}, "INVALID_ARGUMENT", "input `stop` is not valid UTF-8: this model reads text"),
    ({}, "INVALID_ARGUMENT", "input has no `data` and no `body`"),
    ({"data": b'{"inputs": 5}'}, "INVALID_ARGUMENT", "a JSON input needs `prompt`, a string, or `messages`, a list"),
    ({"data": b"a", "temperature": b"-1"}, "INVALID_ARGUMENT", "temperature must be between 0 and 2, got -1.0."),
    ({"data": b"a", "max_tokens": b"0"}, "INVALID_ARGUMENT", "max_tokens must be between 1 and 2147483648, got 0."),
    ({"data": b"a", "max_tokens": b"many"}, "INVALID_ARGUMENT", None),
    ({"data": b"a", "n": b"2"}, "UNIMPLEMENTED", None),
    ({"data": b"a", "messages": b"[1]"}, "INVALID_ARGUMENT", "messages must be a list of objects"),
    ({"data": b"a", "lora_adapter": b"none"}, "NOT_FOUND", "The adapter `none` does not exist."),
    ({"data": b'{"prompt": "a", "model": "none"}'}, "NOT_FOUND", "The model `none` does not exist."),
    ({"data": b"a", "url_path": b"v1/nothing"}, "NOT_FOUND", "Unknown API endpoint: v1/nothing"),
    ({"data": b"a", "url_path": b"generate"}, "NOT_FOUND", "Unknown API endpoint: generate"),
    ({"data": b"a", "url_path": b"v1/load_lora_adapter"}, "NOT_FOUND", "Unknown API endpoint: v1/load_lora_adapter"),
])  # fmt: skip
async def test_refused_inputs(server, values, code, text):
    found, lines = await refused(server.predict(**values))
    assert found == code
    assert text is None or lines == [text, "org.pytorch.serve.http.InternalServerException"]
    assert not server.worker.submits


async def test_models_and_versions(server):
    archive = "org.pytorch.serve.archive.model."
    assert await refused(server.predict("", data=b"a")) == (
        "INTERNAL", ["Parameter model_name is required.", "BadRequestException.()"])  # fmt: skip
    assert await refused(server.predict("X", data=b"a")) == (
        "INTERNAL", ["Model not found: X", archive + "ModelNotFoundException"])  # fmt: skip
    assert await refused(server.predict("demo", "7", data=b"a")) == (
        "INTERNAL",
        ["Model version: 7 does not exist for model: demo", archive + "ModelVersionNotFoundException"],
    )
    assert await server.predict("demo", "1.0", data=b"The capital of Spain")


async def test_a_model_without_workers(server):
    await server.manage("RegisterModel", url="densenet161.mar")
    code, lines = await refused(server.predict("densenet161", data=b"a"))
    assert code == "INTERNAL"
    assert lines[0].startswith(f'Model "densenet161" {NO_WORKER}')
    assert lines[1] == "InternalServerException.()"
    code, lines = await refused(server.predict("densenet161", "1.0", data=b"a"))
    assert lines[0].startswith(f'Model "densenet161" Version 1.0" {NO_WORKER}')


async def test_the_strict_statuses(begin):
    server = await begin(strict_statuses=True)
    assert (await refused(server.predict("X", data=b"a")))[0] == "NOT_FOUND"
    server.serving.services.admission.max_concurrent_requests = 0
    assert (await refused(server.predict(data=b"a")))[0] == "RESOURCE_EXHAUSTED"


async def test_a_full_server(server):
    server.serving.services.admission.max_concurrent_requests = 0
    code, lines = await refused(server.predict(data=b"a"))
    assert code == "INTERNAL"
    assert lines[0].startswith(f"Model {NO_WORKER}")


@pytest.mark.parametrize(("script", "code", "text"), [
    (Script(fail_after=0), "UNAVAILABLE", "Prediction failed"),
    (Script(tokens=ids(" of"), finish=FinishReason.TIMEOUT), "INTERNAL", "Worker died."),
])  # fmt: skip
async def test_failures(server, script, code, text):
    server.worker.default = script
    found, lines = await refused(server.predict(data=b"The capital"))
    assert found == code
    assert lines == [text, "org.pytorch.serve.http.InternalServerException"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_refusal_of_a_busy_model_names_it(server, streamed):
    server.worker.default = Script(fail_after=0, failure=Failure(FailureCode.OVERLOADED))
    call = anext(aiter(server.stream(data=b"a"))) if streamed else server.predict("demo", "1.0", data=b"a")
    code, lines = await refused(call)
    assert code == "INTERNAL"
    assert lines[0].startswith('Model "demo" has no' if streamed else 'Model "demo" Version 1.0" has no worker')


async def test_a_stream_has_a_message_for_each_token(server):
    tokens = ids(" of Spain and of France")
    server.worker.scripts.append(Script(tokens=[*tokens, 2], per_step=3))
    pieces = [answer.prediction async for answer in server.stream(data=b"The capital")]
    assert b"".join(pieces) == b" of Spain and of France"
    assert len(pieces) == len(tokens)


async def test_a_stream_of_json(server):
    server.worker.scripts.append(says(" of Spain"))
    answers = [json.loads(a.prediction) async for a in server.stream(data=b'{"prompt": "The capital"}')]
    assert "".join(answer["text"] for answer in answers) == " of Spain"
    assert [answer["finish_reason"] for answer in answers][-1] == "stop"


async def test_errors_of_a_stream_are_statuses(server):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [answer async for answer in server.stream("X", data=b"a")]
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    server.worker.scripts.append(says(" of Spain", fail_after=1))
    call = server.stream(data=b"The capital")
    assert (await call.read()).prediction
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("streams", [True, False])
async def test_a_cancelled_call_stops_the_engine(server, streams):
    gate = Gate()
    server.worker.scripts.append(Script(tokens=ids(" of Spain"), gate_after=1, gate=gate))
    call = server.stream(data=b"The capital") if streams else asyncio.ensure_future(server.predict(data=b"The capital"))
    await eventually(lambda: server.worker.submits)
    if streams:
        await call.read()
    call.cancel()
    await eventually(lambda: server.worker.aborted)
    await eventually(lambda: server.serving.services.admission.in_flight == 0)


async def test_a_deadline_stops_the_engine(server):
    server.worker.scripts.append(Script(tokens=ids(" of Spain"), gate_after=1))
    call = server.channel.unary_unary("/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(server.asked(data=b"The capital").SerializeToString(), timeout=0.5)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: server.worker.aborted)


class TestOpenAI:
    """Bodies with `url_path`."""

    async def test_completions(self, server):
        server.worker.scripts.append(says(" of Spain"))
        body = json.dumps({"model": "demo", "prompt": "The capital", "stream": True}).encode()
        answer = json.loads(await server.predict(data=body, url_path=b"v1/completions"))
        assert (answer["object"], answer["model"]) == ("text_completion", "demo")
        assert answer["choices"][0]["text"] == " of Spain"

    async def test_a_text_is_the_prompt(self, server):
        server.worker.scripts.append(says(" of Spain"))
        answer = json.loads(await server.predict(data=b"The capital", url_path=b"/v1/completions", max_tokens=b"8"))
        assert answer["choices"][0]["text"] == " of Spain"
        assert server.worker.submits[0].params.max_tokens == 8

    async def test_chat_streams(self, server):
        server.worker.scripts.append(says("Madrid"))
        body = json.dumps({"messages": [{"role": "user", "content": "What?"}]}).encode()
        chunks = [a.prediction async for a in server.stream(data=body, url_path=b"v1/chat/completions")]
        assert chunks[-1] == b"data: [DONE]\n\n"
        events = [json.loads(chunk.removeprefix(b"data: ")) for chunk in chunks[:-1]]
        assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events) == "Madrid"
        assert server.serving.services.admission.in_flight == 0

    async def test_models(self, server):
        answer = json.loads(await server.predict(url_path=b"v1/models"))
        assert len(answer["data"]) == 1

    async def test_another_model_is_not_found_there(self, server):
        await server.registry.create_deployment(NewDeployment(("densenet161",), "other", "1.0", workers=1), "test")
        await server.serving.connected(2)
        body = json.dumps({"model": "other", "prompt": "a"}).encode()
        assert (await refused(server.predict(data=body, url_path=b"v1/completions")))[0] == "NOT_FOUND"

    async def test_errors_are_statuses(self, server):
        body = b'{"prompt": "a", "temperature": -1}'
        code, lines = await refused(server.predict(data=body, url_path=b"v1/completions"))
        assert code == "INVALID_ARGUMENT"
        assert lines[0].startswith("temperature must be")

    async def test_a_cancelled_stream_stops_the_engine(self, server):
        server.worker.scripts.append(Script(tokens=ids(" of Spain"), gate_after=1))
        call = server.stream(data=b"The capital", url_path=b"v1/completions")
        await call.read()
        call.cancel()
        await eventually(lambda: server.worker.aborted)
        await eventually(lambda: server.serving.services.admission.in_flight == 0)


@pytest.mark.parametrize("values", [
    {"data": b"a", "lora_adapter": b"fine"},
    {"data": b"a", "adapters": b'["fine"]'},
    {"data": b"a", "adapters": b"fine"},
    {"data": b'{"prompt": "a", "model": "fine"}'},
    {"data": b'{"prompt": "a"}', "lora_adapter": b"fine", "url_path": b"v1/completions"},
])  # fmt: skip
async def test_adapters(server, values):
    server.registry.adapters = (AdapterEntry("fine", "d1", "/nowhere", 1),)
    server.registry.publish()
    await server.predict(**values)
    assert server.worker.submits[-1].adapter.digest == "d1"


@pytest.mark.parametrize("name", ["2024", "null", "true"])
async def test_names_of_adapters_that_look_like_json(server, name):
    server.registry.adapters = (AdapterEntry(name, "d1", "/nowhere", 1),)
    server.registry.publish()
    await server.predict(data=b"a", adapters=name.encode())
    assert server.worker.submits[-1].adapter.digest == "d1"


async def test_an_adapter_is_a_model_of_its_own(server):
    server.registry.adapters = (AdapterEntry("fine", "d1", "/nowhere", 1),)
    server.registry.publish()
    await server.predict("fine", data=b"a")
    assert server.worker.submits[-1].adapter.digest == "d1"


async def test_keys_of_this_server(server):
    server.serving.services.authenticator.required = True
    code, lines = await refused(server.predict(data=b"a"))
    assert (code, lines[0]) == ("UNAUTHENTICATED", "Unauthorized")
    assert (await refused(server.manage("ListModels")))[0] == "UNAUTHENTICATED"


async def test_a_drain_refuses(server):
    server.serving.services.admission.draining = True
    assert (await refused(server.predict(data=b"a")))[0] == "UNAVAILABLE"
