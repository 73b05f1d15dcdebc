"""InferenceAPIsService: predictions over gRPC, whole, as a stream of pieces, and in sequences."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from google.protobuf.empty_pb2 import Empty

from inference.dialects.torchserve.errors import grpc_renderer, indented, naming
from inference.dialects.torchserve.predictions import chosen, openai, predict, read_input
from inference.dialects.torchserve.protocol import inference_pb2 as pb
from inference.dialects.torchserve.sequences import Sequences
from inference.dialects.torchserve.tokens import key_of
from inference.server.grpc_calls import Calls, Method
from inference.workers.scope import within

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    import grpc

    from inference.dialects.torchserve.predictions import Prediction
    from inference.dialects.torchserve.state import State
    from inference.dialects.torchserve.versions import Served
    from inference.generation.caller import RpcCaller
    from inference.server.grpc_calls import Timeouts
    from management.snapshot import ApiKeyEntry

SERVICE = "org.pytorch.serve.grpc.inference.InferenceAPIsService"


class InferenceService:
    """The methods by name."""

    def __init__(self, state: State, timeouts: Timeouts) -> None:
        self._state, self._timeouts = state, timeouts

    def handler(self) -> grpc.GenericRpcHandler:
        """For `grpc.aio.Server.add_generic_rpc_handlers`."""
        methods = {
            "Ping": Method(Empty, "infer", self._ping),
            "Predictions": Method(pb.PredictionsRequest, "infer", self._predict, infers=True),
            "StreamPredictions": Method(pb.PredictionsRequest, "infer", answers=self._stream, infers=True),
            "StreamPredictions2": Method(pb.PredictionsRequest, "infer", stream=self._sequences),
        }
        services, strict = self._state.services, self._state.settings.torchserve_strict_statuses

        def authenticate(metadata: dict[str, Any], scope: str) -> ApiKeyEntry | None:
            return key_of(self._state.authenticator, metadata, scope, services.holder.current)

        return Calls(SERVICE, methods, services, self._timeouts, grpc_renderer(strict=strict), authenticate)

    async def _ping(self, request: Any, caller: RpcCaller) -> Any:
        return pb.TorchServeHealthResponse(health=indented(self._state.health).decode())

    async def _predict(self, request: Any, caller: RpcCaller) -> Any:
        return pb.PredictionResponse(prediction=await whole(self._state, request, caller))

    async def _stream(self, request: Any, caller: RpcCaller) -> AsyncGenerator[Any, None]:
        async with aclosing(pieces(self._state, request, caller)) as found:
            async for piece in found:
                yield pb.PredictionResponse(prediction=piece)

    async def _sequences(self, requests: AsyncIterator[Any], caller: RpcCaller) -> AsyncGenerator[Any, None]:
        state = self._state

        async def answer(request: Any) -> bytes:
            state.services.rates.admit_again(caller.tenant)
            with state.services.admission.permit(caller.permit_holder):
                time_left_s = state.services.time_left_s(caller.standing)
                return await state.services.router.when_known(
                    caller.tenant, lambda: whole(state, request, caller), time_left_s
                )

        async with aclosing(Sequences(answer, state.settings.torchserve_strict_statuses).answers(requests)) as answers:
            async for response in answers:
                yield response


async def whole(state: State, request: Any, caller: RpcCaller) -> bytes:
    """The complete prediction for a request. Raises ServingErrors."""
    given = await read_input(request.input)
    name, version = request.model_name, request.model_version
    with naming(name, version):
        if given.path:
            served = await chosen(state, given, name, version)
            async with aclosing(openai(state, given, served, caller, streams=False)) as chunks:
                return b"".join([chunk async for chunk in chunks])
        return await (await predict(state, given, name, version, caller)).whole()


async def pieces(state: State, request: Any, caller: RpcCaller) -> AsyncGenerator[bytes, None]:
    """The pieces of the prediction for a request. Raises ServingErrors."""
    given, router = await read_input(request.input), state.services.router
    name, version = request.model_name, request.model_version
    time_left_s = state.services.time_left_s(caller.standing)

    async def known() -> Served:
        served = await chosen(state, given, name, version)
        with within(served.entry.public_id):
            router.resolve(served.model)
        return served

    async def prepared() -> Prediction:
        return await predict(state, given, name, version, caller)

    with naming(name, version):
        if given.path:
            served = await router.when_known(caller.tenant, known, time_left_s)
            found = openai(state, given, served, caller, streams=True)
        else:
            found = (await router.when_known(caller.tenant, prepared, time_left_s)).pieces()
        async with aclosing(found):
            async for piece in found:
                yield piece
