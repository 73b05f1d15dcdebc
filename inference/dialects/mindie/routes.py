"""The routes of MindIE's three planes: service, management and metrics."""

from __future__ import annotations

import secrets
from functools import partial
from typing import TYPE_CHECKING, Any

from inference.dialects.mindie import (
    chat,
    completions,
    errors,
    faults,
    health,
    lora,
    management,
    native,
    queries,
    tgi,
    triton,
    vllm,
)
from inference.dialects.mindie.disaggregation import control
from inference.dialects.mindie.health import NotHealthy
from inference.http.exchange import Response
from inference.http.routing import Route, RouteSet

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from inference.dialects.mindie.state import MindieState
    from inference.errors import ServingError
    from inference.http.exchange import Exchange, Headers
    from inference.services import Services

    MindieHandler = Callable[[Exchange, Services, MindieState], Awaitable[Any]]

MODEL = "/v2/models/{model:name}"


def route_sets(state: MindieState) -> dict[str, RouteSet]:
    """The routes of each plane by its name. Handlers get the state as their third argument."""
    planes = {
        "service": service_routes(state),
        "management": management_routes(state),
        "metrics": metrics_routes(state),
    }
    return {name: RouteSet(routes, _render, frozenset(errors.TYPES)) for name, routes in planes.items()}


def service_routes(state: MindieState) -> tuple[Route, ...]:
    """Models and inference."""
    routes = _Routes(state, "infer")
    routes.get("/v1/models", queries.list_models, "List the model and its adapters")
    routes.get("/v1/models/{model:name}", queries.retrieve, "Retrieve a model or an adapter")
    routes.get("/v2", queries.server, "Describe the server")
    routes.get(MODEL, queries.metadata, "Get the metadata of a model's tensors")
    routes.get(f"{MODEL}/config", queries.config, "Get a model's configuration")
    routes.infer("/", tgi.compat, "Generate text as TGI, streamed on request")
    routes.infer("/generate", vllm.generate, "Generate text as vLLM (`prompt`) or TGI (`inputs`)")
    routes.infer("/generate_stream", tgi.generate_stream, "Stream text as TGI")
    routes.infer("/v1/chat/completions", chat.create, "Answer a conversation as OpenAI")
    routes.infer("/v1/completions", completions.create, "Complete a prompt as OpenAI")
    routes.infer("/infer", native.infer, "Generate text as MindIE")
    routes.infer("/infer_token", native.infer, "Generate text from token ids as MindIE")
    routes.infer(f"{MODEL}/infer", triton.infer, "Infer with tensors of token ids as Triton")
    routes.post(f"{MODEL}/stopInfer", triton.stop, "Stop a running request")
    routes.infer(f"{MODEL}/generate", triton.generate, "Generate text as Triton")
    routes.infer(f"{MODEL}/generate_stream", triton.generate_stream, "Stream text as Triton")
    # All callers' results are on one stream, and a new reader takes it from the earlier one: not for everybody who may infer.
    routes.get(
        "/dresult", control.results, "Get the results of all requests that this decode node runs", scope="manage"
    )
    routes.post("/v1/tokenizer", queries.tokenizer, "Count and list the tokens of a text")
    return tuple(routes.made)


def management_routes(state: MindieState) -> tuple[Route, ...]:
    """Status and management."""
    routes = _Routes(state, "manage")
    routes.get("/v2/health/live", health.live, "Check whether the service runs")
    routes.get("/v2/health/ready", health.live, "Check whether the service is ready")
    routes.get(f"{MODEL}/ready", health.model_ready, "Check whether a model is ready")
    routes.get("/health", health.health, "Check whether the service is healthy")
    # The first two generate a token, and /stopService stops the service, although their method is GET.
    routes.get("/health/timed", health.timed, "Generate one token within 10 seconds", changes=True)
    routes.get("/health/timed{wait}", health.timed, "Generate one token within the given seconds", changes=True)
    routes.get("/info", management.info, "List the models and the limits")
    routes.get(f"{MODEL}/getSlotCount", management.slots, "Count the free slots and tokens")
    routes.get("/stopService", management.stop_service, "Drain and stop the service", changes=True)
    routes.get("/v1/config", management.config, "Get the deployment's configuration")
    routes.get("/v1/status", management.status, "Get the role, the load and the links")
    routes.get("/v2/status", management.status_v2, "Get the role, the load by rank and the links")
    for role in ("prefill", "decode", "flex"):
        routes.post(f"/v1/role/{role}", control.role, f"Set the role to {role}")
    for role in ("prefill", "decode"):
        routes.post(f"/v2/role/{role}", control.role_v2, f"Set the role to {role}")
    routes.get("/v1/engine-server/running-status", faults.running_status, "Get the engine's status and its errors")
    routes.post("/v1/engine-server/fault-handling-command", faults.command, "Recover from a fault (always refused)")
    routes.get("/metrics-json", management.metrics_json, "Get the latencies and the load")
    routes.post("/v1/load_lora_adapter", lora.load, "Load an adapter")
    routes.post("/v1/unload_lora_adapter", lora.unload, "Unload an adapter")
    return tuple(routes.made)


def metrics_routes(state: MindieState) -> tuple[Route, ...]:
    """The metrics page."""
    routes = _Routes(state, "metrics")
    routes.get("/metrics", management.metrics, "List the metrics in the Prometheus format")
    return tuple(routes.made)


class _Routes:
    """Builds a plane's routes; a path with a model also exists with a version, which is ignored."""

    def __init__(self, state: MindieState, scope: str) -> None:
        self._state, self._scope = state, scope
        self.made: list[Route] = []

    def get(
        self, path: str, handler: MindieHandler, summary: str, changes: bool = False, scope: str | None = None
    ) -> None:
        """Add a GET route; `scope` is its own, None: the plane's."""
        self._make("GET", path, handler, summary, changes=changes, scope=scope or self._scope)

    def post(self, path: str, handler: MindieHandler, summary: str) -> None:
        """Add a POST route that needs no permit."""
        self._make("POST", path, handler, summary, scope=self._scope)

    def infer(self, path: str, handler: MindieHandler, summary: str) -> None:
        """Add an inference route, which needs a permit; requests refused without one are counted."""
        self._make("POST", path, handler, summary, scope=self._scope, needs_permit=True, refused=self._count_refusal)

    def _make(self, method: str, path: str, handler: MindieHandler, summary: str, **fields: Any) -> None:
        bound = partial(_with_state, handler, self._state)
        for form in dict.fromkeys([path, path.replace(MODEL, f"{MODEL}/versions/{{version:name}}")]):
            self.made.append(Route(method, form, bound, _render, summary, **fields))

    def _count_refusal(self, services: Services) -> None:
        self._state.metrics.received()
        self._state.metrics.failed()


async def _with_state(handler: MindieHandler, state: MindieState, exchange: Exchange, services: Services) -> None:
    await handler(exchange, services, state)


def _render(error: ServingError) -> Response:
    return Response(503, b"", b"") if isinstance(error, NotHealthy) else errors.render(error)


def answer_headers(path: str, request_id: str) -> Headers:
    """Headers with an id that is different for every response."""
    return [(b"RequestUUID", secrets.token_hex(16).encode())]
