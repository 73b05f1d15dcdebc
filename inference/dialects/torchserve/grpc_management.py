"""ManagementAPIsService: models are registered, scaled, described and removed over gRPC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inference.dialects.torchserve import management
from inference.dialects.torchserve.description import describe
from inference.dialects.torchserve.errors import grpc_renderer, indented, translated
from inference.dialects.torchserve.management import Registration, positive
from inference.dialects.torchserve.protocol import management_pb2 as pb
from inference.dialects.torchserve.tokens import key_of
from inference.errors import ModelNotFound
from inference.server.grpc_calls import Calls, Method

if TYPE_CHECKING:
    import grpc

    from inference.dialects.torchserve.state import State
    from inference.generation.caller import RpcCaller
    from inference.server.grpc_calls import Timeouts
    from management.snapshot import ApiKeyEntry

SERVICE = "org.pytorch.serve.grpc.management.ManagementAPIsService"


class ManagementService:
    """The methods by name; every one answers with a ManagementResponse. A number that is not positive is not given."""

    def __init__(self, state: State, timeouts: Timeouts) -> None:
        self._state, self._timeouts = state, timeouts

    def handler(self) -> grpc.GenericRpcHandler:
        """For `grpc.aio.Server.add_generic_rpc_handlers`."""
        methods = {
            "DescribeModel": Method(pb.DescribeModelRequest, "manage", self._describe),
            "ListModels": Method(pb.ListModelsRequest, "manage", self._list),
            "RegisterModel": Method(pb.RegisterModelRequest, "manage", self._register),
            "ScaleWorker": Method(pb.ScaleWorkerRequest, "manage", self._scale),
            "SetDefault": Method(pb.SetDefaultRequest, "manage", self._set_default),
            "UnregisterModel": Method(pb.UnregisterModelRequest, "manage", self._unregister),
        }
        services = self._state.services

        def authenticate(metadata: dict[str, Any], scope: str) -> ApiKeyEntry | None:
            return key_of(self._state.authenticator, metadata, scope, services.holder.current)

        return Calls(SERVICE, methods, services, self._timeouts, grpc_renderer(managing=True), authenticate)

    async def _describe(self, request: Any, caller: RpcCaller) -> Any:
        name, version = request.model_name, request.model_version
        customized = request.customized and version != "all"
        try:
            value = await describe(self._state, name, version, customized)
        except ModelNotFound as error:
            if customized:  # TorchServe asks a worker then, and says what an inference would
                raise translated(error, self._state.settings.torchserve_strict_statuses) from error
            raise
        return pb.ManagementResponse(msg=indented(value).decode())

    async def _list(self, request: Any, caller: RpcCaller) -> Any:
        value = await management.list_models(self._state, request.limit, request.next_page_token)
        return pb.ManagementResponse(msg=indented(value).decode())

    async def _register(self, request: Any, caller: RpcCaller) -> Any:
        asked = Registration(
            url=request.url,
            model_name=request.model_name,
            handler=request.handler,
            runtime=request.runtime,
            batch_size=request.batch_size,
            max_batch_delay=request.max_batch_delay,
            initial_workers=request.initial_workers,
            response_timeout=request.response_timeout,
            startup_timeout=request.startup_timeout,
            synchronous=request.synchronous,
        )
        outcome = await management.register(self._state, asked, caller.tenant)
        return pb.ManagementResponse(msg=outcome.message)

    async def _scale(self, request: Any, caller: RpcCaller) -> Any:
        minimum = positive(request.min_worker, 1)
        maximum = positive(request.max_worker, minimum)
        outcome = await management.scale(
            self._state,
            request.model_name,
            request.model_version,
            minimum,
            maximum,
            request.synchronous,
            caller.tenant,
        )
        return pb.ManagementResponse(msg=outcome.message)

    async def _set_default(self, request: Any, caller: RpcCaller) -> Any:
        outcome = await management.set_default(self._state, request.model_name, request.model_version, caller.tenant)
        return pb.ManagementResponse(msg=outcome.message)

    async def _unregister(self, request: Any, caller: RpcCaller) -> Any:
        outcome = await management.unregister(self._state, request.model_name, request.model_version, caller.tenant)
        return pb.ManagementResponse(msg=outcome.message)
