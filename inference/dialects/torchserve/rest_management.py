"""The REST twin of the management service, the replacement of keys, and the metrics."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from inference.dialects.torchserve import management
from inference.dialects.torchserve.description import describe
from inference.dialects.torchserve.errors import ARCHIVE, TorchServeError, bad_request
from inference.dialects.torchserve.management import Registration
from inference.dialects.torchserve.rest_inputs import query_of
from inference.errors import RouteNotFound
from inference.http.exchange import Response
from inference.http.offload import in_thread
from inference.vendors.model_server import pretty

if TYPE_CHECKING:
    from inference.dialects.torchserve.management import Outcome
    from inference.dialects.torchserve.state import State
    from inference.http.exchange import Exchange
    from inference.services import Services

NUMBERS = ("batch_size", "max_batch_delay", "initial_workers", "response_timeout", "startup_timeout")
TEXTS = ("model_name", "handler", "runtime")
PROMETHEUS = b"text/plain; version=0.0.4; charset=utf-8"
_NUMBER = re.compile(r"[+-]?[0-9]{1,9}")


async def register(exchange: Exchange, services: Services, state: State) -> None:
    """POST /models: parameters in the query, or in a JSON body; waits for the workers unless told otherwise."""
    given: dict[str, Any] = dict(query_of(exchange))
    if (await exchange.body()).strip():
        given = {**await exchange.json(), **given}
    if given.get("url") == "":
        raise TorchServeError("empty url", "NOT_FOUND", f"{ARCHIVE}ModelNotFoundException", 404)
    asked = Registration(
        url=_text(given, "url"),
        synchronous=_flag(given, "synchronous", True),
        **{name: _text(given, name) for name in TEXTS},  # type: ignore[arg-type]
        **{name: _number(given, name, 0) for name in NUMBERS},  # type: ignore[arg-type]
    )
    await _tell(exchange, await management.register(state, asked, exchange.tenant))


async def scale(exchange: Exchange, services: Services, state: State) -> None:
    """PUT /models/{model}[/{version}]."""
    given, path = query_of(exchange), exchange.parameters
    minimum = _number(given, "min_worker", 1)
    maximum = _number(given, "max_worker", minimum)
    if minimum < 0 or maximum < 0:
        raise bad_request("min_worker and max_worker must not be negative.")
    synchronous = _flag(given, "synchronous", False)
    version = path.get("version") or _text(given, "model_version")
    outcome = await management.scale(state, path["model"], version, minimum, maximum, synchronous, exchange.tenant)
    await _tell(exchange, outcome)


async def list_models(exchange: Exchange, services: Services, state: State) -> None:
    """GET /models."""
    given = query_of(exchange)
    limit = _number(given, "limit", management.MAX_PAGE)
    await exchange.respond(pretty(await management.list_models(state, limit, _number(given, "next_page_token", 0))))


async def show(exchange: Exchange, services: Services, state: State) -> None:
    """GET /models/{model}[/{version}]."""
    path, customized = exchange.parameters, _flag(query_of(exchange), "customized", False)
    await exchange.respond(pretty(await describe(state, path["model"], path.get("version", ""), customized)))


async def unregister(exchange: Exchange, services: Services, state: State) -> None:
    """DELETE /models/{model}[/{version}]."""
    path = exchange.parameters
    await _tell(exchange, await management.unregister(state, path["model"], path.get("version", ""), exchange.tenant))


async def set_default(exchange: Exchange, services: Services, state: State) -> None:
    """PUT /models/{model}/{version}/set-default."""
    path = exchange.parameters
    await _tell(exchange, await management.set_default(state, path["model"], path["version"], exchange.tenant))


async def token(exchange: Exchange, services: Services, state: State) -> None:
    """GET /token?type=management or inference: a new key in place of the old one."""
    kind = query_of(exchange).get("type", "")
    if state.keys is None:
        raise RouteNotFound("Not Found")
    if kind not in ("management", "inference"):
        raise bad_request("type must be management or inference.")
    await exchange.respond(pretty(await in_thread(state.keys.replace, kind)))


async def metrics(exchange: Exchange, services: Services, state: State) -> None:
    """GET /metrics?name[]=: the metrics in the Prometheus format."""
    names = [value for name, value in parse_qsl(exchange.query) if name == "name[]"]
    await exchange.respond(Response(200, state.metrics.render(names[:100]), PROMETHEUS))


async def _tell(exchange: Exchange, outcome: Outcome) -> None:
    await exchange.respond(pretty({"status": outcome.message}, outcome.status))


def _text(given: dict[str, Any], name: str) -> str:
    value = given.get(name) or ""
    if not isinstance(value, str):
        raise bad_request(f"{name} must be a string.")
    return value


def _number(given: dict[str, Any], name: str, default: int) -> int:
    """A whole number, also as text; TorchServe takes what is none as not given."""
    value = given.get(name, default)
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not -(1 << 31) <= value < 1 << 31:
        return default
    return value


def _flag(given: dict[str, Any], name: str, default: bool) -> bool:
    value = given.get(name, default)
    return value if isinstance(value, bool) else str(value).lower() == "true"
