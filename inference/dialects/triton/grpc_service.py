"""GRPCInferenceService: inference over gRPC, unary and as streams of requests and responses."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import structlog

from inference.dialects.triton import repository, server_settings, shared_memory
from inference.dialects.triton.embed import embed, embeds
from inference.dialects.triton.errors import error_parts, grpc_parts
from inference.dialects.triton.grpc_messages import (
    inference_of,
    log_response,
    log_settings_of,
    response_of,
    trace_response,
    trace_settings_of,
)
from inference.dialects.triton.infer import is_stop, prepare
from inference.dialects.triton.model import EXTENSIONS, configuration, find, metadata
from inference.dialects.triton.protocol import grpc_service_pb2 as pb
from inference.dialects.triton.queries import model_ready, server_ready
from inference.dialects.triton.statistics import settings_of, statistics_of
from inference.errors import InternalError, InvalidRequest, ModelNotFound, ServingError
from inference.http.offload import INLINE_BYTES, in_thread_if
from inference.http.refusals import log_refusal
from inference.server.grpc_calls import Calls, Method

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping

    import grpc

    from inference.generation.caller import RpcCaller
    from inference.server.grpc_calls import Timeouts
    from inference.services import Services
    from inference.workers.target import Target

SERVICE = "inference.GRPCInferenceService"
MAX_IN_STREAM = 256
"""Requests of one stream that may run at once."""
MAX_UNWRITTEN = 8
"""Responses of one stream that wait for the client to read; when it is full, the stream's requests wait and merge
their output.
"""
logger = structlog.get_logger(__name__)


class GrpcInferenceService:
    """The methods by name; their messages are defined in `protocol/grpc_service.proto`."""

    def __init__(self, services: Services, timeouts: Timeouts) -> None:
        self._services, self._timeouts = services, timeouts

    def handler(self) -> grpc.GenericRpcHandler:
        """For `grpc.aio.Server.add_generic_rpc_handlers`."""
        methods = {
            "ServerLive": Method(None, None, self._live),
            "ServerReady": Method(None, None, self._ready),
            "ServerMetadata": Method(None, "infer", self._server),
            "ModelReady": Method(pb.ModelReadyRequest, "infer", self._model_ready),
            "ModelMetadata": Method(pb.ModelMetadataRequest, "infer", self._metadata),
            "ModelConfig": Method(pb.ModelConfigRequest, "infer", self._config),
            "ModelStatistics": Method(pb.ModelStatisticsRequest, "infer", self._statistics),
            "ModelInfer": Method(pb.ModelInferRequest, "infer", self._infer, infers=True),
            "ModelStreamInfer": Method(pb.ModelInferRequest, "infer", stream=self._stream),
            "SystemSharedMemoryStatus": Method(pb.SystemSharedMemoryStatusRequest, "infer", self._system_regions),
            "SystemSharedMemoryRegister": Method(pb.SystemSharedMemoryRegisterRequest, "infer", self._no_memory),
            "SystemSharedMemoryUnregister": Method(pb.SystemSharedMemoryUnregisterRequest, "infer", self._no_memory),
            "CudaSharedMemoryStatus": Method(pb.CudaSharedMemoryStatusRequest, "infer", self._cuda_regions),
            "CudaSharedMemoryRegister": Method(pb.CudaSharedMemoryRegisterRequest, "infer", self._no_memory),
            "CudaSharedMemoryUnregister": Method(pb.CudaSharedMemoryUnregisterRequest, "infer", self._no_memory),
            "TraceSetting": Method(pb.TraceSettingRequest, "infer", self._trace),
            "LogSettings": Method(pb.LogSettingsRequest, "infer", self._log),
            "RepositoryIndex": Method(pb.RepositoryIndexRequest, "manage", self._index),
            "RepositoryModelLoad": Method(pb.RepositoryModelLoadRequest, "manage", self._load),
            "RepositoryModelUnload": Method(pb.RepositoryModelUnloadRequest, "manage", self._unload),
        }
        return Calls(SERVICE, methods, self._services, self._timeouts, grpc_parts)

    async def _live(self, request: Any, caller: RpcCaller) -> Any:
        return pb.ServerLiveResponse(live=True)

    async def _ready(self, request: Any, caller: RpcCaller) -> Any:
        return pb.ServerReadyResponse(ready=server_ready(self._services))

    async def _model_ready(self, request: Any, caller: RpcCaller) -> Any:
        try:
            ready = model_ready(self._services, request.name, request.version)
        except ModelNotFound:
            ready = False
        return pb.ModelReadyResponse(ready=ready)

    async def _server(self, request: Any, caller: RpcCaller) -> Any:
        name = settings_of(self._services).triton_server_name
        return pb.ServerMetadataResponse(name=name, version=self._services.version, extensions=EXTENSIONS)

    async def _metadata(self, request: Any, caller: RpcCaller) -> Any:
        target = find(self._services.router, request.name, request.version)
        return pb.ModelMetadataResponse(**metadata(target, request.name))

    async def _config(self, request: Any, caller: RpcCaller) -> Any:
        value = configuration(find(self._services.router, request.name, request.version), request.name)
        config = pb.ModelConfig(
            name=value["name"],
            platform=value["platform"],
            backend=value["backend"],
            input=[
                pb.ModelInput(
                    name=i["name"], data_type=i["data_type"], dims=map(int, i["dims"]), optional=i["optional"]
                )
                for i in value["input"]
            ],
            output=[
                pb.ModelOutput(name=o["name"], data_type=o["data_type"], dims=map(int, o["dims"]))
                for o in value["output"]
            ],
            model_transaction_policy=pb.ModelTransactionPolicy(**value["model_transaction_policy"]),
            parameters={k: pb.ModelParameter(**v) for k, v in value["parameters"].items()},
        )
        return pb.ModelConfigResponse(config=config)

    async def _statistics(self, request: Any, caller: RpcCaller) -> Any:
        router = self._services.router
        targets = [find(router, request.name, request.version)] if request.name else router.targets
        entries = []
        for target in targets:
            entry = target.entry
            value = statistics_of(self._services).of(entry.name, request.name or entry.name, str(entry.version))
            kinds = {kind: pb.StatisticDuration(**duration) for kind, duration in value["inference_stats"].items()}
            plain = {key: value[key] for key in ("name", "version", "last_inference", "inference_count",
                                                 "execution_count")}  # fmt: skip
            entries.append(pb.ModelStatistics(**plain, inference_stats=pb.InferStatistics(**kinds)))
        return pb.ModelStatisticsResponse(model_stats=entries)

    async def _index(self, request: Any, caller: RpcCaller) -> Any:
        entries = await repository.index(self._services, request.ready)
        return pb.RepositoryIndexResponse(models=[pb.RepositoryIndexResponse.ModelIndex(**entry) for entry in entries])

    async def _load(self, request: Any, caller: RpcCaller) -> Any:
        name = request.model_name or request.repository_name  # KServe's older form has the name in the first field
        await repository.load(self._services, name, dict(request.parameters), caller.tenant)
        return pb.RepositoryModelLoadResponse(model_name=name, is_loaded=True)

    async def _unload(self, request: Any, caller: RpcCaller) -> Any:
        name = request.model_name or request.repository_name
        await repository.unload(self._services, name, caller.tenant)
        return pb.RepositoryModelUnloadResponse(model_name=name, is_unloaded=True)

    async def _system_regions(self, request: Any, caller: RpcCaller) -> Any:
        shared_memory.check_region("system", request.name)
        return pb.SystemSharedMemoryStatusResponse()

    async def _cuda_regions(self, request: Any, caller: RpcCaller) -> Any:
        shared_memory.check_region("cuda", request.name)
        return pb.CudaSharedMemoryStatusResponse()

    async def _no_memory(self, request: Any, caller: RpcCaller) -> Any:
        shared_memory.refuse()

    async def _trace(self, request: Any, caller: RpcCaller) -> Any:
        server_settings.check_model(self._services, request.model_name)
        server_settings.update_trace(trace_settings_of(request))
        return trace_response(server_settings.TRACE)

    async def _log(self, request: Any, caller: RpcCaller) -> Any:
        server_settings.update_log(log_settings_of(request))
        return log_response(server_settings.LOG)

    async def _infer(self, request: Any, caller: RpcCaller) -> Any:
        services = self._services
        find(
            services.router, request.model_name, request.model_version
        )  # an unknown model is said before a wrong message
        inference = await in_thread_if(request.ByteSize() > INLINE_BYTES, inference_of, request)
        if (target := embeds(inference, services)) is not None:
            tensors = await embed(inference, services, caller)
            return response_of(inference, str(target.entry.version), tensors)
        prepared = await prepare(inference, services, caller)
        if prepared.streams:
            raise InvalidRequest("ModelInfer answers once: use ModelStreamInfer for a stream", "stream")
        return response_of(inference, prepared.version, await prepared.run())

    async def _stream(self, requests: AsyncIterator[Any], caller: RpcCaller) -> AsyncGenerator[Any, None]:
        """Responses in order of arrival. A failed request is reported in the stream, which continues; a message that is no request
        ends the call, and all that runs on it. Raises ServingError.
        """
        answers: asyncio.Queue[Any] = asyncio.Queue(maxsize=MAX_UNWRITTEN)
        reader = asyncio.ensure_future(self._read(requests, caller, answers))
        try:
            while (answer := await answers.get()) is not None:
                if isinstance(answer, Exception):
                    raise answer
                yield answer
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[Any], caller: RpcCaller, answers: asyncio.Queue[Any]) -> None:
        """Start every request of a stream at once; None in the queue marks the end."""
        running: dict[asyncio.Task[None], str] = {}
        slots = asyncio.Semaphore(MAX_IN_STREAM)
        try:
            async for request in requests:
                await slots.acquire()
                task = asyncio.ensure_future(self._answer(request, caller, answers, running))
                running[task] = request.id
                task.add_done_callback(running.pop)
                task.add_done_callback(lambda _: slots.release())
            if running:
                await asyncio.wait(running)
            await answers.put(None)
        except Exception as error:  # raised in the writer, which ends the stream
            await answers.put(error)
        finally:  # also when the client has stopped reading
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _answer(
        self, request: Any, caller: RpcCaller, answers: asyncio.Queue[Any], running: Mapping[asyncio.Task[None], str]
    ) -> None:
        try:
            async with aclosing(self._responses(request, caller, running)) as responses:
                async for response in responses:
                    await answers.put(pb.ModelStreamInferResponse(infer_response=response))
        except ServingError as error:
            log_refusal(error, "gRPC", "ModelStreamInfer", error_parts(error)[1], caller.request_id)
            failed = pb.ModelInferResponse(model_name=request.model_name, id=request.id)
            await answers.put(pb.ModelStreamInferResponse(error_message=error_parts(error)[2], infer_response=failed))
        except Exception:  # outermost handler: the stream's other requests continue
            logger.exception("unhandled error", method="ModelStreamInfer")
            text = error_parts(InternalError("internal error"))[2]
            await answers.put(pb.ModelStreamInferResponse(error_message=text))

    async def _responses(
        self, request: Any, caller: RpcCaller, running: Mapping[asyncio.Task[None], str]
    ) -> AsyncGenerator[Any, None]:
        """One response for each step if the request asks for a stream, else one; the last is marked as final. A stop signal ends
        the `running` requests of its id, and its own response is their final one.
        """
        services = self._services
        services.rates.admit_again(caller.tenant)
        with services.admission.permit(caller.permit_holder):
            inference = await in_thread_if(request.ByteSize() > INLINE_BYTES, inference_of, request)
            if is_stop(inference):
                for task in [task for task, number in running.items() if number == inference.request_id]:
                    if task is not asyncio.current_task():
                        task.cancel()
                yield response_of(inference, inference.version, [], final=True)
                return

            async def known() -> Target | None:
                return embeds(inference, services)

            target = await services.router.when_known(caller.tenant, known, services.time_left_s(caller.standing))
            if target is not None:
                tensors = await embed(inference, services, caller)
                yield response_of(inference, str(target.entry.version), tensors, final=True)
                return
            prepared = await prepare(inference, services, caller)
            if not prepared.streams:
                yield response_of(inference, prepared.version, await prepared.run(), final=True)
                return
            async with aclosing(prepared.steps()) as steps:
                async for tensors, last in steps:
                    yield response_of(inference, prepared.version, tensors, final=last)
