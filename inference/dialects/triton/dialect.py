"""The declaration of Triton's dialect (KServe v2), with its gRPC service and its metrics plane."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference.dialects.triton.grpc_service import GrpcInferenceService
from inference.dialects.triton.metrics import ROUTES
from inference.dialects.triton.routes import FRONT
from inference.dialects.triton.settings import TritonSettings
from inference.dialects.triton.statistics import TritonStatistics
from inference.planes.declaration import Dialect, GrpcListener, Parts, PlaneListener, Setup
from inference.server.grpc_calls import Timeouts

if TYPE_CHECKING:
    from inference.planes.declaration import ServerOptions, Terminate
    from inference.services import Services


def configure(settings: TritonSettings, server: ServerOptions) -> Setup:
    """Configure the gRPC service and the metrics plane, which listen on the server's address."""

    def start(services: Services, terminate: Terminate) -> Parts:
        timeouts = Timeouts(server.body_timeout_s, server.slow_client_timeout_s)
        service = GrpcListener(
            server.host,
            settings.grpc_port,
            GrpcInferenceService(services, timeouts).handler(),
            settings.grpc_max_message_bytes,
            settings.grpc_max_connections,
        )
        metrics = PlaneListener(
            "triton-metrics", server.host, settings.triton_metrics_port, ROUTES, server.max_body_bytes
        )
        return Parts([metrics], [service], [TritonStatistics(settings)])

    addresses = {
        "DRAGOMAN_GRPC_PORT": (server.host, settings.grpc_port),
        "DRAGOMAN_TRITON_METRICS_PORT": (server.host, settings.triton_metrics_port),
    }
    return Setup(start=start, addresses=addresses)


DIALECT = Dialect("triton", "Triton", front=FRONT, settings=TritonSettings, configure=configure)
