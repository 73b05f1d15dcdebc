"""The trace and the logging extension: this server traces nothing and logs as it was started, so that settings can be
read, and updates are checked in Triton's words and refused unless they change nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inference.dialects.triton.errors import NotUpdated, Unsupported
from inference.dialects.triton.queries import model_ready
from inference.errors import InvalidRequest, ModelNotFound
from inference.http.exchange import json_response, parse_json

if TYPE_CHECKING:
    from inference.http.exchange import Exchange
    from inference.services import Services

TRACE: dict[str, Any] = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}
"""Triton's values at its start without `--trace-config`."""
LOG: dict[str, Any] = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}
INT32 = -(1 << 31), (1 << 31) - 1
NUMBERS = {"trace_rate": (0, (1 << 32) - 1), "trace_count": (-1, INT32[1]), "log_frequency": (0, (1 << 32) - 1)}
"""The ranges that Triton names in its errors; a number must fit into 32 bits with a sign in any case."""


async def trace(exchange: Exchange, services: Services) -> None:
    """GET and POST /v2/trace/setting, and of a model."""
    check_model(services, exchange.parameters.get("model", ""))
    if exchange.method == "POST":
        update_trace(await _body(exchange))
    await exchange.respond(json_response(TRACE))


async def log(exchange: Exchange, services: Services) -> None:
    """GET and POST /v2/logging."""
    if exchange.method == "POST":
        update_log(await _body(exchange))
    await exchange.respond(json_response(LOG))


def check_model(services: Services, name: str) -> None:
    """Raise InvalidRequest for a model that is not ready; "" is the whole server."""
    try:
        ready = not name or model_ready(services, name, "")
    except ModelNotFound:
        ready = False
    if not ready:
        raise InvalidRequest(f"Request for unknown model : {name[:200]}", "model")


def update_trace(asked: dict[str, Any]) -> None:
    """Check an update; null stands for the value at the start. Raises InvalidRequest, Unsupported or NotUpdated."""
    if "trace_file" in asked:
        raise Unsupported("trace file location can not be updated through network protocol", "trace_file")
    level = asked.get("trace_level")
    if level is not None:
        if not isinstance(level, list) or not all(isinstance(each, str) for each in level):
            raise InvalidRequest("trace_level must be a list of strings", "trace_level")
        if "OFF" in level and len(level) > 1:
            raise InvalidRequest("Expect only one trace level 'OFF' is specified", "trace_level")
    for name, (low, high) in NUMBERS.items():
        if asked.get(name) is not None:
            _check_number(name, asked[name], low, high)
    _unchanged(asked, TRACE, "the server does not support tracing")


def update_log(asked: dict[str, Any]) -> None:
    """Check an update; null leaves a value as it is. Raises InvalidRequest, Unsupported or NotUpdated."""
    if asked.get("log_file") is not None:
        raise Unsupported("log file location can not be updated through network protocol", "log_file")
    for name in ("log_info", "log_warning", "log_error"):
        if not isinstance(asked.get(name), bool | None):
            raise InvalidRequest(f"expect boolean for '{name}'", name)
    level = asked.get("log_verbose_level")
    if level is not None and (isinstance(level, bool) or not isinstance(level, int) or not 0 <= level < 1 << 32):
        raise InvalidRequest("expect unsigned integer for 'log_verbose_level'", "log_verbose_level")
    form = asked.get("log_format")
    if not isinstance(form, str | None):
        raise InvalidRequest("expect string for 'log_format'", "log_format")
    if form not in (None, "default", "ISO8601"):
        raise NotUpdated(f"invalid argument for --log_format, got: {form[:100]}", "log_format")
    _unchanged(asked, LOG, "the server does not support dynamic logging")


def _check_number(name: str, text: Any, low: int, high: int) -> None:
    """A whole number as text."""
    if not isinstance(text, str):
        raise InvalidRequest(f"{name} must be a number, as a string", name)
    try:
        number = int(text[:20])
    except ValueError as error:
        raise InvalidRequest(f"Unable to parse '{name}', got: {text[:100]}", name) from error
    if not INT32[0] <= number <= INT32[1] or (number < 0 and low == 0):
        outside = f"Unable to parse '{name}', value is out of range [ {low}, {high} ], got: {text[:100]}"
        raise InvalidRequest(outside, name)
    if number < low:
        raise InvalidRequest(f"Unable to parse '{name}'. Expecting value >= {low}, got: {number}", name)


def _unchanged(asked: dict[str, Any], now: dict[str, Any], refusal: str) -> None:
    changed = next((n for n in now if asked.get(n) is not None and asked[n] != now[n]), None)
    if changed is not None:
        raise NotUpdated(refusal, changed)


async def _body(exchange: Exchange) -> dict[str, Any]:
    """The JSON body, which may be empty."""
    body = await exchange.body()
    return await exchange.work(parse_json, body) if body.strip() else {}
