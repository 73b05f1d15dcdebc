"""The standard services beside a vendor's own: gRPC health checking, and server reflection. Neither needs a key."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from inference.errors import InvalidRequest, ServingError, ShuttingDown
from inference.server.grpc_calls import Calls, Method

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    import grpc

    from inference.generation.caller import RpcCaller
    from inference.server.grpc_calls import Timeouts
    from inference.services import Services

HEALTH = "grpc.health.v1.Health"
REFLECTION = "grpc.reflection.v1alpha.ServerReflection"
CHECK_EVERY_S = 1.0
_Status = health_pb2.HealthCheckResponse


class UnknownService(ServingError):
    """A health check of a service that is not here."""


def standard_services(
    names: Sequence[str], healthy: Callable[[], bool], services: Services, timeouts: Timeouts
) -> list[grpc.GenericRpcHandler]:
    """The two services for a port on which the services of these names are. `healthy`: whether they can be used now."""
    health = _Health(names, healthy, services)
    reflected = ReflectionServicer((*names, HEALTH, REFLECTION))

    async def reflect(requests: Any, caller: RpcCaller) -> AsyncGenerator[Any, None]:
        async for answer in reflected.ServerReflectionInfo(requests, None):
            yield answer

    checks = {
        "Check": Method(health_pb2.HealthCheckRequest, None, health.check),
        "Watch": Method(health_pb2.HealthCheckRequest, None, answers=health.watch),
    }
    reflections = {"ServerReflectionInfo": Method(reflection_pb2.ServerReflectionRequest, None, stream=reflect)}
    return [
        Calls(HEALTH, checks, services, timeouts, _parts),
        Calls(REFLECTION, reflections, services, timeouts, _parts),
    ]


class _Health:
    """The health of the services; the empty name is the server's."""

    def __init__(self, names: Sequence[str], healthy: Callable[[], bool], services: Services) -> None:
        self._names, self._healthy, self._admission = {"", *names}, healthy, services.admission

    async def check(self, request: Any, caller: RpcCaller) -> Any:
        """The status now; raises UnknownService."""
        if request.service not in self._names:
            raise UnknownService("unknown service")
        return _Status(status=self._status(request.service))

    async def watch(self, request: Any, caller: RpcCaller) -> AsyncGenerator[Any, None]:
        """The status now, and whenever it changes. Raises ShuttingDown, so that nobody who watches holds up the end of the
        server.
        """
        told = None
        while True:
            status = self._status(request.service)
            if status != told:
                told = status
                yield _Status(status=status)
            if self._admission.draining:
                raise ShuttingDown("The server is shutting down.")
            await asyncio.sleep(CHECK_EVERY_S)

    def _status(self, service: str) -> Any:
        if service not in self._names:
            return _Status.SERVICE_UNKNOWN
        return _Status.SERVING if self._healthy() else _Status.NOT_SERVING


def _parts(error: ServingError) -> tuple[str, str]:
    if isinstance(error, UnknownService):
        return "NOT_FOUND", error.message
    return "INVALID_ARGUMENT" if isinstance(error, InvalidRequest) else "UNAVAILABLE", error.message
