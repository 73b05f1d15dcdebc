"""The routes of TorchServe's three REST planes: inference, management and metrics."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from inference.dialects.torchserve import rest_inference, rest_management
from inference.dialects.torchserve.errors import STATUSES, render, render_managing
from inference.http.exchange import json_response
from inference.http.openapi import document
from inference.http.routing import Route, RouteSet
from inference.vendors.model_server import answer_headers as answer_headers

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from inference.dialects.torchserve.state import State
    from inference.http.exchange import Exchange
    from inference.http.routing import Render
    from inference.services import Services

    StatefulHandler = Callable[[Exchange, Services, State], Awaitable[None]]

ANY = ("GET", "POST", "PUT")
MODEL = "/models/{model}"
PREDICTIONS = "/predictions/{model}"
WORKFLOWS = (
    ("POST", "/workflows"), ("GET", "/workflows"), ("GET", "/workflows/{workflow}"), ("DELETE", "/workflows/{workflow}"),
)  # fmt: skip
"""Refused, and that only to those who have a key."""


def route_sets(state: State) -> dict[str, RouteSet]:
    """The routes of each plane by its name. Handlers get the state as their third argument."""
    made = {
        "inference": RouteSet(_inference(state), render, STATUSES),
        "management": RouteSet(_management(state), render_managing, STATUSES),
        "metrics": RouteSet(_metrics(state), render_managing, STATUSES),
    }
    return made


def _inference(state: State) -> tuple[Route, ...]:
    routes = _Routes(state, "infer", render)
    handlers = rest_inference
    for method in ("GET", "POST"):
        routes.add(method, "/ping", handlers.ping, "Check whether the server is healthy")
    for method in ANY:
        routes.infer(method, PREDICTIONS, handlers.predictions, "Generate text")
        routes.infer(method, f"{PREDICTIONS}/{{version}}", handlers.predictions, "Generate text with a version")
        routes.infer(method, f"{PREDICTIONS}/{{version}}/{{path:path}}", handlers.predict_below, "Answer as OpenAI")
        routes.add(method, "/explanations/{model}", handlers.explanations, "Refuse the request (not served)")
        routes.add(method, "/wfpredict/{workflow}", handlers.workflows, "Refuse the request (not served)")
    for path in ("/invocations", f"{MODEL}/invoke"):
        routes.infer("POST", path, handlers.invocations, "Generate text, as SageMaker asks for it")
    for path in ("/{model}/predict", "/{model}/{version}/predict"):
        for method in ANY:
            routes.infer(method, path, handlers.predictions, "Generate text, by the path of older clients")
    routes.infer("POST", "/v1/models/{model}:predict", handlers.kserve_predict, "Generate text for KServe's instances")
    routes.infer("POST", "/v2/models/{model}/infer", handlers.kserve_infer, "Run an inference with KServe's tensors")
    routes.described()
    return tuple(routes.made)


def _management(state: State) -> tuple[Route, ...]:
    routes = _Routes(state, "manage", render_managing)
    handlers = rest_management
    routes.add("POST", "/models", handlers.register, "Register a model")
    routes.add("GET", "/models", handlers.list_models, "List the models")
    routes.add("PUT", f"{MODEL}/{{version}}/set-default", handlers.set_default, "Set a model's default version")
    for path in (MODEL, f"{MODEL}/{{version}}"):
        routes.add("PUT", path, handlers.scale, "Scale a model's workers")
        routes.add("GET", path, handlers.show, "Describe a model")
        routes.add("DELETE", path, handlers.unregister, "Unregister a model")
    for method, path in WORKFLOWS:
        routes.add(method, path, rest_inference.workflows, "Refuse the request (not served)")
    routes.add("GET", "/v1/models/{model}", rest_inference.model_ready, "Check whether a model is ready")
    routes.add("GET", "/token", handlers.token, "Replace a key", scope="token", changes=True)
    routes.described()
    return tuple(routes.made)


def _metrics(state: State) -> tuple[Route, ...]:
    routes = _Routes(state, "metrics", render_managing)
    routes.add("GET", "/metrics", rest_management.metrics, "List the metrics in the Prometheus format")
    return tuple(routes.made)


class _Routes:
    """Builds a plane's routes."""

    def __init__(self, state: State, scope: str, render: Render) -> None:
        self._state, self._scope, self._render = state, scope, render
        self.made: list[Route] = []

    def add(
        self, method: str, path: str, handler: StatefulHandler, summary: str, scope: str = "", **fields: Any
    ) -> None:
        """Add a route that needs no permit."""
        bound = partial(_with_state, handler, self._state)
        self.made.append(
            Route(method, path, bound, self._render, summary, scope or self._scope, trailing_slash=True, **fields)
        )

    def infer(self, method: str, path: str, handler: StatefulHandler, summary: str) -> None:
        """Add an inference route; a GET has the side effects of one, too."""
        self.add(method, path, handler, summary, changes=True, needs_permit=True)

    def described(self) -> None:
        """Add OPTIONS /, which describes the plane as OpenAPI."""

        async def describe(exchange: Exchange, services: Services, state: State) -> None:
            own = RouteSet(tuple(self.made), self._render, STATUSES)
            await exchange.respond(json_response(document({"torchserve": own}, services.version)))

        self.add("OPTIONS", "/", describe, "Describe the plane as OpenAPI")


async def _with_state(handler: StatefulHandler, state: State, exchange: Exchange, services: Services) -> None:
    await handler(exchange, services, state)
