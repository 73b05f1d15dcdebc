"""One request of every route and gRPC method to the running server, and the status that it must have."""

from __future__ import annotations

import grpc
import pytest

from tests import calls
from tests.smoke.requests import BODIES, MESSAGES, concrete
from tools.docs.routes_table import Guarded, guarded_routes

pytestmark = pytest.mark.live

OTHERS = {
    204: {
        "control GET /sg_inf/{id}",
    },
    400: {
        "front POST /v1/embeddings",
        "front POST /pooling",
        "front POST /v1/load_lora_adapter",
        "front POST /v1/unload_lora_adapter",
        "front POST /rerank",
        "front POST /v1/rerank",
        "front POST /v2/rerank",
        "front POST /score",
        "front POST /v1/score",
        "front POST /classify",
        "front POST /generative_scoring",
        "front POST /v2/embed",
        "front POST /v1/messages",
        "front POST /v1/messages/count_tokens",
        "front POST /v1/audio/transcriptions",
        "front POST /v1/audio/translations",
        "front POST /v1/responses/render",
        "front POST /inference/v1/generate",
        "front POST /pause",
        "front POST /resume",
        "front POST /abort_requests",
        "front POST /sleep",
        "front POST /wake_up",
        "front POST /reset_prefix_cache",
        "front GET /is_paused",
        "front GET /is_sleeping",
        "front GET /server_info",
        "front POST /v2/repository/models/{model}/load",
        "front POST /v2/repository/{repository}/models/{model}/load",
        "front POST /v2/repository/models/{model}/unload",
        "front POST /v2/repository/{repository}/models/{model}/unload",
        "mindie-service GET /dresult",
        "djl POST /adapters",
        "djl POST /models",
        "djl POST /workflows",
        "torchserve-inference GET /predictions/{model}",
        "torchserve-inference GET /predictions/{model}/{version}",
        "torchserve-inference GET /{model}/predict",
        "torchserve-inference GET /{model}/{version}/predict",
        "torchserve-management POST /models",
    },
    404: {
        "front GET /v1/responses/{id}",
        "front POST /v1/responses/{id}/cancel",
        "front GET /v2/systemsharedmemory/region/{region}/status",
        "front GET /v2/cudasharedmemory/region/{region}/status",
        "front GET /docs/{name}",
        "mindie-service POST /v2/models/{model}/stopInfer",
        "mindie-service POST /v2/models/{model}/versions/{version}/stopInfer",
        "djl GET /adapters/{adapter}",
        "djl DELETE /adapters/{adapter}",
        "djl POST /models/{model}/adapters",
        "djl GET /models/{model}/adapters/{adapter}",
        "djl DELETE /models/{model}/adapters/{adapter}",
        "djl PUT /models/{model}",
        "djl DELETE /models/{model}",
        "djl PUT /models/{model}/{version}",
        "djl DELETE /models/{model}/{version}",
        "djl PUT /workflows/{model}",
        "djl DELETE /workflows/{model}",
        "djl PUT /workflows/{model}/{version}",
        "djl DELETE /workflows/{model}/{version}",
        "torchserve-inference GET /predictions/{model}/{version}/{path}",
        "torchserve-inference PUT /predictions/{model}/{version}/{path}",
        "torchserve-management PUT /models/{model}/{version}/set-default",
        "torchserve-management PUT /models/{model}",
        "torchserve-management DELETE /models/{model}",
        "torchserve-management PUT /models/{model}/{version}",
        "torchserve-management DELETE /models/{model}/{version}",
        "torchserve-management GET /token",
        "control POST /sg_inf/{id}",
        "control PUT /sg_inf/{id}",
        "control PATCH /sg_inf/{id}",
        "control DELETE /sg_inf/{id}",
        "control POST /sg_inf/{id}/update",
        "control PUT /sg_inf/{id}/update",
        "control PATCH /sg_inf/{id}/update",
        "control POST /sg_inf/{id}/scale/up",
        "control POST /sg_inf/{id}/scale/zero",
        "control GET /sg_inf/{id}/gpu_nodes_ips",
        "control GET /secret/AUTH_ENDPOINT_KEY_{id}",
    },
    405: {
        "djl POST /adapters/{adapter}",
        "djl POST /models/{model}/adapters/{adapter}",
    },
    422: {
        "front POST /embed",
        "mindie-management POST /v1/role/prefill",
        "mindie-management POST /v1/role/decode",
        "mindie-management POST /v1/role/flex",
        "mindie-management POST /v1/engine-server/fault-handling-command",
        "control POST /sg_inf/create",
    },
    500: {
        "mindie-metrics GET /metrics",
    },
    501: {
        "front POST /v2/systemsharedmemory/register",
        "front POST /v2/systemsharedmemory/unregister",
        "front POST /v2/systemsharedmemory/region/{region}/register",
        "front POST /v2/systemsharedmemory/region/{region}/unregister",
        "front POST /v2/cudasharedmemory/register",
        "front POST /v2/cudasharedmemory/unregister",
        "front POST /v2/cudasharedmemory/region/{region}/register",
        "front POST /v2/cudasharedmemory/region/{region}/unregister",
        "torchserve-inference GET /explanations/{model}",
        "torchserve-inference GET /wfpredict/{workflow}",
        "torchserve-inference POST /explanations/{model}",
        "torchserve-inference POST /wfpredict/{workflow}",
        "torchserve-inference PUT /explanations/{model}",
        "torchserve-inference PUT /wfpredict/{workflow}",
        "torchserve-management POST /workflows",
        "torchserve-management GET /workflows",
        "torchserve-management GET /workflows/{workflow}",
        "torchserve-management DELETE /workflows/{workflow}",
    },
    503: {
        "mindie-management POST /v2/role/prefill",
        "mindie-management POST /v2/role/decode",
        "mindie-management POST /v1/load_lora_adapter",
        "mindie-management POST /v1/unload_lora_adapter",
    },
}
"""Routes with another answer than 200: they are not supported, name nothing that is there, or need more than a body."""
STATUSES = {route: status for status, routes in OTHERS.items() for route in routes}
CODES = {
    "/inference.GRPCInferenceService/RepositoryModelLoad": grpc.StatusCode.INVALID_ARGUMENT,
    "/inference.GRPCInferenceService/RepositoryModelUnload": grpc.StatusCode.INVALID_ARGUMENT,
    "/org.pytorch.serve.grpc.management.ManagementAPIsService/RegisterModel": grpc.StatusCode.INVALID_ARGUMENT,
    "/org.pytorch.serve.grpc.management.ManagementAPIsService/UnregisterModel": grpc.StatusCode.INVALID_ARGUMENT,
    "/org.pytorch.serve.grpc.management.ManagementAPIsService/ScaleWorker": grpc.StatusCode.NOT_FOUND,
    "/org.pytorch.serve.grpc.management.ManagementAPIsService/SetDefault": grpc.StatusCode.NOT_FOUND,
    "/inference.GRPCInferenceService/SystemSharedMemoryRegister": grpc.StatusCode.UNIMPLEMENTED,
    "/inference.GRPCInferenceService/SystemSharedMemoryUnregister": grpc.StatusCode.UNIMPLEMENTED,
    "/inference.GRPCInferenceService/CudaSharedMemoryRegister": grpc.StatusCode.UNIMPLEMENTED,
    "/inference.GRPCInferenceService/CudaSharedMemoryUnregister": grpc.StatusCode.UNIMPLEMENTED,
}
"""gRPC methods that do not answer OK."""
ENDS_THE_SERVER = "/stopService"
"""Its test is tests/dialects/mindie/test_planes.py::test_stop_service_drains_and_ends."""
ROUTES = [route for route in guarded_routes() if route.path != ENDS_THE_SERVER]


def name(route: Guarded) -> str:
    return f"{route.plane} {route.method} {route.path}"


HTTP = [route for route in ROUTES if route.plane != "gRPC"]
GRPC = [route for route in ROUTES if route.plane == "gRPC"]


@pytest.mark.parametrize("route", HTTP, ids=name)
def test_http(running_server, route):
    path = concrete(route.plane, route.path, changes=route.scope == "manage" and route.method != "GET")
    body = BODIES.get(name(route), {} if route.method in ("POST", "PUT", "PATCH") else None)
    answer = calls.request(route.method, running_server.plane_urls[route.plane] + path, json=body)
    assert answer.status_code == STATUSES.get(name(route), 200), answer.text


@pytest.mark.parametrize("route", GRPC, ids=lambda route: route.path)
def test_grpc(running_server, route):
    message = MESSAGES.get(route.path)
    content = b"" if message is None else message.SerializeToString()
    with grpc.insecure_channel(running_server.grpc_address(route.path)) as channel:
        call = channel.stream_stream(route.path)(iter([content]), timeout=60)
        try:
            next(call, None)
            code = grpc.StatusCode.OK
        except grpc.RpcError as error:
            code = error.code()
        call.cancel()  # some methods go on
    assert code == CODES.get(route.path, grpc.StatusCode.OK)


def test_every_request_has_its_route():
    known = {name(route) for route in ROUTES} | {route.path for route in GRPC}
    assert set(BODIES) | set(STATUSES) | set(MESSAGES) | set(CODES) <= known
