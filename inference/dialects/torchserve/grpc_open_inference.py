"""TorchServe's GRPCInferenceService: KServe's Open Inference Protocol in TorchServe's own package, over the front plane's `infer`.

It is served beside the inference service, under the names and versions that TorchServe's clients know. ServerMetadata is declared
by TorchServe and not implemented; so here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from inference.dialects.torchserve.errors import TorchServeError, grpc_renderer, missing_name, naming, translated
from inference.dialects.torchserve.open_inference import answer_of, without_binary
from inference.dialects.torchserve.protocol import open_inference_pb2 as pb
from inference.dialects.torchserve.tokens import key_of
from inference.dialects.torchserve.versions import find_served
from inference.errors import InvalidRequest, ServingError
from inference.http.offload import INLINE_BYTES, in_thread_if
from inference.server.grpc_calls import Calls, Method
from inference.workers.scope import scope_id, scoped
from inference.workers.versions import find_version

if TYPE_CHECKING:
    import grpc

    from inference.dialects.torchserve.open_inference import Answer
    from inference.dialects.torchserve.state import State
    from inference.generation.caller import RpcCaller
    from inference.server.grpc_calls import Timeouts
    from inference.workers.registry import DeploymentState
    from management.snapshot import ApiKeyEntry

SERVICE = "org.pytorch.serve.grpc.openinference.GRPCInferenceService"
CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip


class OpenInferenceService:
    """The methods by name."""

    def __init__(self, state: State, timeouts: Timeouts) -> None:
        self._state, self._timeouts = state, timeouts

    def handler(self) -> grpc.GenericRpcHandler:
        """For `grpc.aio.Server.add_generic_rpc_handlers`."""
        methods = {
            "ServerLive": Method(pb.ServerLiveRequest, "infer", self._live),
            "ServerReady": Method(pb.ServerReadyRequest, "infer", self._ready),
            "ModelReady": Method(pb.ModelReadyRequest, "infer", self._model_ready),
            "ModelMetadata": Method(pb.ModelMetadataRequest, "infer", self._metadata),
            "ModelInfer": Method(pb.ModelInferRequest, "infer", self._infer, infers=True),
        }
        services, strict = self._state.services, self._state.settings.torchserve_strict_statuses

        def authenticate(metadata: dict[str, Any], scope: str) -> ApiKeyEntry | None:
            return key_of(self._state.authenticator, metadata, scope, services.holder.current)

        return Calls(SERVICE, methods, services, self._timeouts, grpc_renderer(strict=strict), authenticate)

    async def _live(self, request: Any, caller: RpcCaller) -> Any:
        return pb.ServerLiveResponse(live=True)

    async def _ready(self, request: Any, caller: RpcCaller) -> Any:
        return pb.ServerReadyResponse(ready=True)  # as TorchServe's, which answers once it listens

    async def _model_ready(self, request: Any, caller: RpcCaller) -> Any:
        if not request.name:
            raise TorchServeError("Parameter name is required.", "INTERNAL", "BadRequestException.()", 400)
        version = (await self._versions(request.name, request.version))[0]
        ready = sum(worker.state == "ready" for worker in version.workers)
        return pb.ModelReadyResponse(ready=ready >= version.min_workers)

    async def _metadata(self, request: Any, caller: RpcCaller) -> Any:
        if not request.name:
            raise missing_name()
        versions = await self._versions(request.name, request.version)
        # TorchServe knows no tensors either; its platform is empty.
        return pb.ModelMetadataResponse(name=request.name, versions=sorted(each.label for each in versions))

    async def _versions(self, name: str, label: str) -> list[DeploymentState]:
        """All versions of a model, the one of this label (or the default one) first; unknown ones are NOT_FOUND here."""
        services = self._state.services
        states = await services.registry.deployments()
        if scope_id():  # others than the one that the call is limited to do not exist for it
            known = {entry.name for entry in scoped(services.holder.current).deployments}
            states = [state for state in states if state.name in known]
        try:
            found = find_version(states, name, label)
        except ServingError as error:
            raise translated(error, strict=True) from error
        return [found, *(each for each in states if each.served_name == name and each is not found)]

    async def _infer(self, request: Any, caller: RpcCaller) -> Any:
        if request.raw_input_contents:
            raise InvalidRequest("raw_input_contents is not read by TorchServe: use contents", "raw_input_contents")
        services = self._state.services
        served = await find_served(services, request.model_name, request.model_version)
        body = await in_thread_if(request.ByteSize() > INLINE_BYTES, _body, request)
        with naming(request.model_name, request.model_version):
            answer = await answer_of(services, caller, served, request.model_name, body)
        return await in_thread_if(len(answer.outputs) > INLINE_BYTES, _response, answer)


def _body(request: Any) -> dict[str, Any]:
    """The request as JSON; raises InvalidRequest."""
    body: dict[str, Any] = {"parameters": _parameters(request.parameters)}
    body["inputs"] = [_input(given) for given in request.inputs]
    if request.id:
        body["id"] = request.id
    if request.outputs:
        body["outputs"] = [
            {"name": output.name, "parameters": _parameters(output.parameters)} for output in request.outputs
        ]
    return without_binary(body)


def _input(given: Any) -> dict[str, Any]:
    field = CONTENTS.get(given.datatype)
    if field is None:
        raise InvalidRequest(f"input '{given.name[:100]}': unsupported datatype '{given.datatype[:40]}'", "inputs")
    data = list(getattr(given.contents, field))
    if given.datatype == "BYTES":
        try:
            data = [value.decode() for value in data]
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"input '{given.name[:100]}': an element is not valid UTF-8", "inputs") from error
    return {
        "name": given.name,
        "datatype": given.datatype,
        "shape": list(given.shape),
        "parameters": _parameters(given.parameters),
        "data": data,
    }


def _parameters(parameters: Any) -> dict[str, Any]:
    chosen = {name: (value, value.WhichOneof("parameter_choice")) for name, value in parameters.items()}
    return {name: getattr(value, choice) for name, (value, choice) in chosen.items() if choice is not None}


def _response(answer: Answer) -> Any:
    response = pb.ModelInferResponse(model_name=answer.model_name, model_version=answer.model_version, id=answer.id)
    for output in msgspec.json.decode(answer.outputs):
        tensor = response.outputs.add(name=output["name"], datatype=output["datatype"], shape=output["shape"])
        data = output["data"]
        if output["datatype"] == "BYTES":
            data = [value.encode() for value in data]
        getattr(tensor.contents, CONTENTS[output["datatype"]]).extend(data)
    return response
