"""Health, logging and metrics of the server, and the empty descriptions that OPTIONS asks for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from inference.dialects.djl.errors import bad_request
from inference.dialects.djl.models import served_name, target_of
from inference.dialects.djl.parameters import read_parameters
from inference.http.exchange import Response
from inference.vendors.model_server import pretty
from management.snapshot import Availability

if TYPE_CHECKING:
    from inference.http.exchange import Exchange
    from inference.services import Services
    from management.snapshot import DeploymentEntry

LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}


async def ping(exchange: Exchange, services: Services) -> None:
    """GET /ping: the status of each model; 500 if one has failed, 503 while the server shuts down, else 200."""
    entries = [entry for entry in services.holder.current.deployments if entry.is_default_version]
    statuses = {served_name(entry): {"status": _status(services, entry)} for entry in entries}
    failed = any(each["status"] == "FAILED" for each in statuses.values())
    await exchange.respond(pretty(statuses, 503 if services.admission.draining else 500 if failed else 200))


def _status(services: Services, entry: DeploymentEntry) -> str:
    target = target_of(services, entry)
    if entry.availability is Availability.FAILED:
        return "FAILED"
    if target is None:
        return "PENDING"
    return "Healthy" if target.responsive or target.asleep else "Unhealthy"


async def configure_logging(exchange: Exchange, services: Services) -> None:
    """POST /server/logging: the level of the server's log from now on, "info" without one."""
    level = (await read_parameters(exchange)).text("level") or "info"
    if level.lower() not in LEVELS:
        raise bad_request(f"Parameter level must be one of {', '.join(LEVELS)}.")
    logging.getLogger().setLevel(LEVELS[level.lower()])
    await exchange.respond(pretty({"status": "OK"}))


async def metrics(exchange: Exchange, services: Services) -> None:
    """GET /server/metrics: the server's own metrics, in the Prometheus format."""
    await exchange.respond(Response(200, services.metrics.render(), b"text/plain; version=0.0.4; charset=utf-8"))


async def options(exchange: Exchange, services: Services) -> None:
    """OPTIONS: an empty description."""
    await exchange.respond(pretty({}))
