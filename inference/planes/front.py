"""The front plane: which dialects it serves, each as its own vendor's latest server speaks it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from inference.http.routing import Dialect, RouteTable
from inference.planes.metrics_and_docs import operation_dialect
from inference.planes.plane import Plane

if TYPE_CHECKING:
    from inference.http.exchange import Headers
    from inference.services import Services

DIALECTS = (  # a dialect is a folder with `routes.DIALECT`; the first one tells errors on paths that belong to none
    "tgi",
    "openai",
    "vllm",
    "triton",
)


def front_plane(services: Services) -> Plane:
    """The application of port 8000."""
    dialects: list[Dialect] = [import_module(f"inference.dialects.{name}.routes").DIALECT for name in DIALECTS]
    for dialect in dialects:
        if dialect.start is not None:
            dialect.start(services)
    table = RouteTable([*dialects, operation_dialect(dialects)])
    return Plane("front", table, services, services.authenticator, _answer_headers)


def _answer_headers(path: str, request_id: str) -> Headers:
    """OpenAI's clients show this id with every answer and error."""
    return [(b"x-request-id", request_id.encode())] if path.startswith("/v1/") else []
