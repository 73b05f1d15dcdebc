"""StreamPredictions2, Ping, health checks and reflection."""

from __future__ import annotations

import asyncio
import json

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from inference.dialects.torchserve import grpc_inference, grpc_management
from inference.dialects.torchserve.protocol import inference_pb2 as infer
from inference.dialects.torchserve.sequences import MAX_WAITING_BYTES, Sequences
from inference.server.grpc_calls import MAX_QUERIES
from management.snapshot import Availability
from tests.unit.fake_worker import settle
from tests.unit.scripts import Gate, Script, ids, says
from tests.waiting import eventually


async def test_each_sequence_is_answered_in_order(server):
    server.worker.by_seed = {n: says(f" {n}") for n in range(1, 7)}
    asked = [server.asked(sequence=f"s{n % 2}", data=b"The capital", seed=b"%d" % n) for n in range(1, 7)]
    answers = [answer async for answer in server.sequences(iter(asked))]
    assert [a.prediction for a in answers if a.sequence_id == "s1"] == [b" 1", b" 3", b" 5"]
    assert [a.prediction for a in answers if a.sequence_id == "s0"] == [b" 2", b" 4", b" 6"]
    assert not any(answer.HasField("status") for answer in answers)


async def test_errors_are_answers(server):
    asked = [
        server.asked(data=b"a"),
        server.asked("X", sequence="s", data=b"a"),
        server.asked(sequence="s", data=b"a b"),
    ]
    answers = [answer async for answer in server.sequences(iter(asked))]
    by_text = {answer.status.message: answer for answer in answers}
    assert set(by_text) == {"Parameter sequenceId is required.", "Model not found: X", ""}
    nameless = by_text["Parameter sequenceId is required."]
    info = ErrorInfo()
    assert nameless.status.details[0].Unpack(info)
    assert (nameless.status.code, info.reason) == (13, "BadRequestException.()")
    assert by_text["Model not found: X"].status.code == 13
    assert by_text[""].prediction


async def test_the_server_names_a_sequence(server):
    asked = server.asked(data=b"The capital", ts_request_sequence_start=b"true")
    (answer,) = [answer async for answer in server.sequences(iter([asked]))]
    assert answer.sequence_id.startswith("ts-seq-")
    asked = server.asked(data=b"The capital", ts_request_sequence_id=b"mine")
    (answer,) = [answer async for answer in server.sequences(iter([asked]))]
    assert (answer.sequence_id, answer.HasField("status")) == ("mine", False)


async def test_what_is_due_is_answered_after_the_last_request(server):
    gate = Gate()
    server.worker.scripts.append(says(" of Spain", gate_after=1, gate=gate))
    call = server.sequences(iter([server.asked(sequence="s", data=b"The capital")]))
    await eventually(lambda: server.worker.submits)
    gate.open()
    assert [answer.prediction async for answer in call] == [b" of Spain"]


async def test_a_cancelled_stream_stops_all_of_its_generations(server):
    server.worker.default = Script(tokens=ids(" of Spain"), gate_after=1)
    call = server.sequences(iter([server.asked(sequence=str(n), data=b"a") for n in range(3)]))
    reading = asyncio.ensure_future(call.read())
    await eventually(lambda: len(server.worker.submits) == 3)
    call.cancel()
    await eventually(lambda: len(server.worker.aborted) == 3)
    await asyncio.gather(reading, return_exceptions=True)
    await eventually(lambda: server.serving.services.admission.in_flight == 0)


async def test_few_bytes_wait_in_one_call(server):
    gate, read = asyncio.Event(), []

    async def requests():
        for number in range(8):
            read.append(number)
            yield server.asked(sequence="s", data=b"The capital", lora=b"x" * (MAX_WAITING_BYTES // 2))

    async def answer(request):
        await gate.wait()
        return b"a"

    told = Sequences(answer, strict=False).answers(requests())
    first = asyncio.ensure_future(anext(told))
    await eventually(lambda: read)
    await settle()
    assert read == [0, 1]
    gate.set()
    assert (await first).prediction == b"a"
    assert len([answer async for answer in told]) == 7


async def test_a_server_that_drains_ends_idle_streams(server):
    gate = Gate()
    server.worker.scripts.append(says(" of Spain", gate_after=1, gate=gate))
    idle, due = (
        server.sequences(never_ending()),
        server.sequences(never_ending(server.asked(sequence="s", data=b"a b"))),
    )
    await eventually(lambda: server.worker.submits)
    server.serving.services.admission.draining = True
    assert await ended(idle) == ([], "UNAVAILABLE")
    gate.open()
    assert await ended(due) == ([b" of Spain"], "UNAVAILABLE")
    stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
    assert (await ended(stub.ServerReflectionInfo(never_ending())))[1] == "UNAVAILABLE"


async def never_ending(*requests):
    """Requests of a client that does not close its side."""
    for request in requests:
        yield request
    await asyncio.Event().wait()


async def ended(call):
    """The predictions and the status of a stream."""
    found = []
    while (answer := await read_or_end(call)) is not grpc.aio.EOF:
        found.append(answer.prediction)
    return found, (await call.code()).name


async def read_or_end(call):
    try:
        return await call.read()
    except grpc.aio.AioRpcError:
        return grpc.aio.EOF


async def test_watchers_take_no_place_from_checks(server):
    stub = health_pb2_grpc.HealthStub(server.channel)
    watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(MAX_QUERIES + 1)]
    for watch in watches:
        assert (await watch.read()).status == 1
    assert (await stub.Check(health_pb2.HealthCheckRequest())).status == 1
    for watch in watches:
        watch.cancel()


async def test_ping(server):
    call = server.channel.unary_unary(
        f"/{grpc_inference.SERVICE}/Ping", Empty.SerializeToString, infer.TorchServeHealthResponse.FromString
    )
    assert (await call(Empty())).health == '{\n  "status": "Healthy"\n}'
    states = server.serving.holder.current.deployments
    failed = [
        type(e)(**{f: getattr(e, f) for f in e.__struct_fields__} | {"availability": Availability.FAILED})
        for e in states
    ]
    server.serving.holder.publish(type(server.serving.holder.current)(tuple(failed)))
    assert json.loads((await call(Empty())).health) == {"status": "Unhealthy"}


async def test_health_checks(server):
    stub = health_pb2_grpc.HealthStub(server.channel)
    for service in ("", grpc_inference.SERVICE, grpc_management.SERVICE):
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status == 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(health_pb2.HealthCheckRequest(service="none"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watch = stub.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == 1
    server.serving.services.admission.draining = True
    assert (await watch.read()).status == 2
    assert await ended(watch) == ([], "UNAVAILABLE")  # nobody who watches holds up the end


async def test_reflection(server):
    stub = reflection_pb2_grpc.ServerReflectionStub(server.channel)
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=grpc_inference.SERVICE),
    ]
    listed, file = [answer async for answer in stub.ServerReflectionInfo(iter(asked))]
    names = {service.name for service in listed.list_services_response.service}
    assert names >= {grpc_inference.SERVICE, grpc_management.SERVICE, "grpc.health.v1.Health"}
    assert len(file.file_descriptor_response.file_descriptor_proto) >= 3
