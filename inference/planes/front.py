"""The front plane: all dialects' front routes, each as its vendor's latest server behaves."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from inference.admission.permits import Admission
from inference.errors import RouteNotFound
from inference.http.routing import RouteTable, route_for
from inference.planes.links import LinkPlane
from inference.planes.metrics_and_docs import operation_routes
from inference.planes.plane import Plane

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inference.http.exchange import Exchange, Headers
    from inference.planes.declaration import Dialect
    from inference.services import Services

UNLIMITED = 1 << 31


def front_planes(services: Services, dialects: Iterable[Dialect]) -> tuple[Plane, Plane]:
    """The applications of the front port: all routes, and each deployment's own. The first dialect renders errors for paths
    that belong to no dialect.
    """
    fronts = {dialect.name: dialect.front for dialect in dialects if dialect.front is not None}
    table = RouteTable([*fronts.values(), operation_routes(fronts)])

    async def handle(exchange: Exchange, permitted: bool) -> None:
        routes, exchange.parameters = table.find(exchange.method, exchange.path)
        if routes[0].scope != "infer":
            raise RouteNotFound("Not Found")
        own = replace(services, admission=Admission(UNLIMITED)) if permitted else services
        await route_for(routes, await exchange.json()).handler(exchange, own)

    services.delegation.open(handle)
    parts = (table, services, services.authenticator, _answer_headers)
    return Plane("front", *parts), LinkPlane("front", *parts)


def _answer_headers(path: str, request_id: str) -> Headers:
    """OpenAI's clients show this id with every response and error."""
    return [(b"x-request-id", request_id.encode())] if path.startswith("/v1/") else []
