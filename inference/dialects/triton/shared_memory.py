"""The two shared-memory extensions, which are switched off: no region is ever registered, and clients are told so in
Triton's words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inference.dialects.triton.errors import NotFound, Unsupported
from inference.http.exchange import json_response

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inference.http.exchange import Exchange
    from inference.services import Services

KINDS = ("system", "cuda")
DISABLED = "Client shared memory is disabled."


async def status(exchange: Exchange, services: Services) -> None:
    """GET /v2/{kind}sharedmemory/status and .../region/{region}/status."""
    kind = next(kind for kind in KINDS if exchange.path.startswith(f"/v2/{kind}sharedmemory/"))
    check_region(kind, exchange.parameters.get("region", ""))
    await exchange.respond(json_response([]))


async def change(exchange: Exchange, services: Services) -> None:
    """POST .../register and .../unregister."""
    refuse()


def check_region(kind: str, region: str) -> None:
    """Raise NotFound if a region is named."""
    if region:
        raise NotFound(f"Unable to find {kind} shared memory region: '{region[:200]}'")


def refuse() -> None:
    """Raise Unsupported for every change."""
    raise Unsupported(DISABLED)


def check_tensor(parameters: Mapping[str, Any], field: str) -> None:
    """Raise NotFound if an input or output is said to lie in a region."""
    region = parameters.get("shared_memory_region")
    if region:
        raise NotFound(f"Unable to find shared memory region: '{str(region)[:200]}'", field)
