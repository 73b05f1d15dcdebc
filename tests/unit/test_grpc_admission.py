"""Rates, standing and refusals of gRPC calls: the same rules as for HTTP, in metadata and statuses."""

from __future__ import annotations

import grpc
import pytest

from engine.failures import Failure, FailureCode
from engine.messages import Tenant
from inference.dialects.triton.grpc_service import GrpcInferenceService
from inference.dialects.triton.protocol import grpc_service_pb2 as pb
from inference.server.grpc_calls import Timeouts
from management.snapshot import ApiKeyEntry, KeyLimits, hash_key
from tests.unit.dialects.test_triton_grpc import SERVICE, Client, request
from tests.unit.scripts import Script

BEARER = {"authorization": "Bearer k1.s"}


@pytest.fixture
async def client(start, sockets):
    """A client of a server with one key, of five requests a minute."""
    serving = await start(api_key_required=True, objectives={"critical": 3})
    limits = KeyLimits(weight=2.0, requests_per_minute=5)
    serving.keys = {"k1": ApiKeyEntry("k1", "k1", hash_key("k1.s"), frozenset({"infer"}), None, limits=limits)}
    serving.publish()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([GrpcInferenceService(serving.services, Timeouts(5, 5)).handler()])
    server.add_insecure_port(f"unix:{sockets}/grpc.sock")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{sockets}/grpc.sock") as channel:
        made = Client(channel)
        made.serving = serving
        yield made
    await server.stop(0)


async def infer(client, **metadata):
    return await client.ask("ModelInfer", request(), pb.ModelInferResponse, **{**BEARER, **metadata})


async def test_metadata_and_the_calls_deadline_are_its_standing(client):
    named = {"x-gateway-fairness-id": "team-a", "x-gateway-inference-objective": "critical"}
    await infer(client, **named)
    submit = client.serving.worker.submits[0]
    assert (submit.tenant, submit.band) == (Tenant("k1", "team-a", 2.0), 3)
    assert submit.timeout_s < 15, "the client's own limit of 10 s; gRPC reads its clock late on a busy machine"
    await infer(client, **{"x-request-timeout": "2.5"})
    assert client.serving.worker.submits[1].timeout_s <= 2.5


async def test_bad_metadata_are_named(client):
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await infer(client, **{"x-request-timeout": "soon"})
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "x-request-timeout" in failed.value.details()


async def test_the_rate_of_a_key(client):
    for _ in range(5):
        await infer(client)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await infer(client)
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailers = dict(failed.value.trailing_metadata())
    assert 1 <= int(trailers["retry-after"]) <= 12
    assert len(client.serving.worker.submits) == 5


async def test_every_request_of_a_stream_counts(client):
    call = client.channel.stream_stream(
        SERVICE + "ModelStreamInfer", lambda m: m.SerializeToString(), pb.ModelStreamInferResponse.FromString
    )(iter([request() for _ in range(7)]), timeout=10, metadata=tuple(BEARER.items()))
    answers = [answer async for answer in call]
    refused = [answer for answer in answers if answer.error_message]
    assert len(refused) == 2
    assert "5 requests a minute" in refused[0].error_message
    assert len(client.serving.worker.submits) == 5


@pytest.mark.parametrize(("code", "status"), [
    (FailureCode.OVERLOADED, grpc.StatusCode.UNAVAILABLE),
    (FailureCode.OVER_SHARE, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (FailureCode.TOO_LATE, grpc.StatusCode.UNAVAILABLE),
])  # fmt: skip
async def test_a_full_server_and_a_full_share_have_statuses_of_their_own(client, code, status):
    client.serving.worker.default = Script(fail_after=0, failure=Failure(code, {"wait_ms": 2500}))
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await infer(client)
    assert failed.value.code() is status
    assert dict(failed.value.trailing_metadata())["retry-after-ms"] == "2500"
