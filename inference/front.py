"""The front plane: which dialects it serves, each as its own vendor's latest server speaks it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference.dialects.openai import errors as openai_errors
from inference.dialects.openai.routes import ROUTES as OPENAI
from inference.dialects.tgi import errors as tgi_errors
from inference.dialects.tgi.routes import ROUTES as TGI
from inference.operations import operation_routes
from inference.planes import Plane
from inference.routing import RouteTable

if TYPE_CHECKING:
    from collections.abc import Callable

    from inference.asgi import Exchange, Headers, Response
    from inference.errors import ServingError
    from inference.services import Services


def front_plane(services: Services) -> Plane:
    """The application of port 8000."""
    dialects = [*OPENAI, *TGI]
    return Plane("front", RouteTable([*dialects, *operation_routes(dialects)], _fallback), services, _answer_headers)


def _answer_headers(exchange: Exchange) -> Headers:
    """OpenAI's clients show this id with every answer and error."""
    return [(b"x-request-id", exchange.request_id.encode())] if exchange.path.startswith("/v1/") else []


def _fallback(path: str) -> Callable[[ServingError], Response]:
    """Whose error shape a path without a route gets."""
    return openai_errors.render if path.startswith("/v1/") else tgi_errors.render
