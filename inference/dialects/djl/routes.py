"""The routes of DJL Serving's plane."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from inference.dialects.djl import adapters, inference, listing, management, operations
from inference.dialects.djl.errors import STATUSES, render, render_inference
from inference.dialects.djl.selection import SELECTING, polls
from inference.http.routing import Route, RouteSet

if TYPE_CHECKING:
    from inference.dialects.djl.state import DjlState
    from inference.http.exchange import Exchange
    from inference.http.routing import Handler
    from inference.services import Services

INFERENCE = ("/invocations", "/predictions/{model}", "/predictions/{model}/{version}", "/models/{model}/invoke")
CHAT = "/v1/chat/completions"


def routes(state: DjlState) -> RouteSet:
    """All routes; of patterns that fit one path, the first one counts."""
    routes = (*_inference(state), *_adapters(), *_management())
    # DJL Serving splits a path at its slashes, and an empty last part is none.
    return RouteSet(tuple(replace(route, trailing_slash=True) for route in routes), render, STATUSES)


def _inference(state: DjlState) -> list[Route]:
    async def infer(exchange: Exchange, services: Services) -> None:
        await inference.infer(exchange, services, state)

    found = [Route("GET", "/ping", operations.ping, render, "List the models' health", scope=None)]
    for path in (*INFERENCE, CHAT):
        summary = "Answer a conversation" if path == CHAT else "Generate text"
        found.append(
            Route("POST", path, infer, render_inference, summary, needs_permit=True, asks=polls, selecting=SELECTING)
        )
        found.append(Route("OPTIONS", path, operations.options, render, "Describe the route", scope=None))
    found.append(Route("OPTIONS", "/", operations.options, render, "Describe the server", scope=None))
    return found


def _adapters() -> list[Route]:
    found = []
    for base in ("/adapters", "/models/{model}/adapters"):
        for method, path, handler, summary in (
            ("GET", base, adapters.list_adapters, "List the adapters"),
            ("POST", base, adapters.register, "Register an adapter"),
            # Names of adapters may contain slashes, so the handler finds the end of the path itself.
            ("GET", f"{base}/{{adapter:path}}", adapters.describe, "Describe an adapter"),
            ("DELETE", f"{base}/{{adapter:path}}", adapters.unregister, "Unregister an adapter"),
            ("POST", f"{base}/{{adapter:path}}", adapters.update, "Update an adapter: {adapter}/update"),
        ):
            found.append(Route(method, path, handler, render, summary, scope="manage"))
    return found


def _management() -> list[Route]:
    def manage(method: str, path: str, handler: Handler, summary: str) -> Route:
        return Route(method, path, handler, render, summary, scope="manage")

    found = [
        manage("GET", "/models", listing.list_models, "List the models"),
        manage("POST", "/models", management.register, "Register a model"),
        manage("GET", "/workflows", listing.list_workflows, "List the models as workflows"),
        manage("POST", "/workflows", management.refuse_workflow, "Register a workflow (refused)"),
        manage("POST", "/server/logging", operations.configure_logging, "Set the log's level"),
        Route("GET", "/server/metrics", operations.metrics, render, "List the metrics", scope="metrics"),
    ]
    for base in ("/models", "/workflows"):
        for path in (f"{base}/{{model}}", f"{base}/{{model}}/{{version}}"):
            found += [
                manage("GET", path, listing.describe, "Describe a model's versions and workers"),
                manage("PUT", path, management.scale, "Set the limits of a model's workers"),
                manage("DELETE", path, management.unregister, "Unregister a model"),
            ]
    return found
