"""MindIE's three planes: the route tables of the service, management and metrics listeners."""

from __future__ import annotations

import secrets
from functools import partial
from typing import TYPE_CHECKING, Any

from inference.dialects.mindie import (
    chat,
    completions,
    errors,
    health,
    lora,
    management,
    native,
    queries,
    tgi,
    triton,
    vllm,
)
from inference.dialects.mindie.health import NotHealthy
from inference.http.exchange import Response
from inference.http.routing import Dialect, Route, RouteTable
from inference.planes.plane import Plane

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from inference.dialects.mindie.state import MindieState
    from inference.errors import ServingError
    from inference.http.auth import Authenticator
    from inference.http.exchange import Exchange, Headers
    from inference.services import Services

    MindieHandler = Callable[[Exchange, Services, MindieState], Awaitable[Any]]

MODEL = "/v2/models/{model:name}"
Rows = tuple[tuple[str, str, "MindieHandler", str], ...]

SERVICE: Rows = (
    ("GET", "/v1/models", queries.list_models, "The model and its adapters"),
    ("GET", "/v1/models/{model:name}", queries.retrieve, "One model or adapter"),
    ("GET", "/v2", queries.server, "The server"),
    ("GET", MODEL, queries.metadata, "A model's tensors"),
    ("GET", f"{MODEL}/config", queries.config, "A model's configuration"),
    ("POST", "/", tgi.compat, "TGI: generate, streamed if asked"),
    ("POST", "/generate", vllm.generate, "vLLM with `prompt`, TGI with `inputs`"),
    ("POST", "/generate_stream", tgi.generate_stream, "TGI: stream"),
    ("POST", "/v1/chat/completions", chat.create, "OpenAI: answer a conversation"),
    ("POST", "/v1/completions", completions.create, "OpenAI: continue a prompt"),
    ("POST", "/infer", native.infer, "MindIE: generate"),
    ("POST", "/infer_token", native.infer, "MindIE: generate from token ids"),
    ("POST", f"{MODEL}/infer", triton.infer, "Triton: tensors of token ids"),
    ("POST", f"{MODEL}/stopInfer", triton.stop, "Stop a running request"),
    ("POST", f"{MODEL}/generate", triton.generate, "Triton: generate"),
    ("POST", f"{MODEL}/generate_stream", triton.generate_stream, "Triton: stream"),
    ("GET", "/dresult", queries.decode_results, "Results of a decode node; refused"),
    ("POST", "/v1/tokenizer", queries.tokenizer, "Count and show tokens"),
)
MANAGEMENT: Rows = (
    ("GET", "/v2/health/live", health.live, "Whether the service lives"),
    ("GET", "/v2/health/ready", health.live, "Whether the service is ready"),
    ("GET", f"{MODEL}/ready", health.model_ready, "Whether a model is ready"),
    ("GET", "/health", health.health, "Whether the service is healthy"),
    ("GET", "/health/timed", health.timed, "A real inference of one token"),
    ("GET", "/health/timed{wait}", health.timed, "The same within -N seconds"),
    ("GET", "/info", management.info, "Models and limits"),
    ("GET", f"{MODEL}/getSlotCount", management.slots, "Free slots and tokens"),
    ("GET", "/stopService", management.stop_service, "Drain and end"),
    ("GET", "/v1/config", management.config, "The deployment's configuration"),
    ("GET", "/v1/status", management.status, "Role, load and links"),
    ("GET", "/v2/status", management.status_v2, "Role, load and links by rank"),
    *(("POST", f"/v1/role/{role}", management.role, "Set the role") for role in ("prefill", "decode", "flex")),
    *(("POST", f"/v2/role/{role}", management.role_v2, "Set the role") for role in ("prefill", "decode")),
    ("GET", "/metrics-json", management.metrics_json, "Latencies and load"),
    ("POST", "/v1/load_lora_adapter", lora.load, "Load an adapter"),
    ("POST", "/v1/unload_lora_adapter", lora.unload, "Unload an adapter"),
)
CHANGING_GETS = (management.stop_service, health.timed)
"""One ends the service, the other computes."""
METRICS: Rows = (("GET", "/metrics", management.metrics, "Metrics in the Prometheus format"),)


def service_plane(services: Services, state: MindieState, authenticator: Authenticator) -> Plane:
    """Tables 2 and 3: models and inference."""
    return _plane("mindie-service", SERVICE, "infer", services, state, authenticator)


def management_plane(services: Services, state: MindieState, authenticator: Authenticator) -> Plane:
    """Table 1: status and management."""
    return _plane("mindie-management", MANAGEMENT, "manage", services, state, authenticator)


def metrics_plane(services: Services, state: MindieState, authenticator: Authenticator) -> Plane:
    """The metrics alone."""
    return _plane("mindie-metrics", METRICS, "metrics", services, state, authenticator)


def _plane(
    name: str, rows: Rows, scope: str, services: Services, state: MindieState, authenticator: Authenticator
) -> Plane:
    def refused(_: Services) -> None:
        state.metrics.received()
        state.metrics.failed()

    infers = {handler for method, _, handler, _ in SERVICE if method == "POST"} - {triton.stop, queries.tokenizer}
    routes = tuple(
        Route(
            method,
            each,
            partial(_with, handler, state),
            _render,
            summary,
            scope,
            changes=handler in CHANGING_GETS,
            takes_place=handler in infers,
            refused=refused,
        )
        for method, path, handler, summary in rows
        for each in _forms(path)
    )
    return Plane(
        name, RouteTable([Dialect(routes, _render, frozenset(errors.TYPES))]), services, authenticator, _answer_headers
    )


def _forms(path: str) -> list[str]:
    """A path with a model may name a version, which makes no difference."""
    return [path, path.replace(MODEL, f"{MODEL}/versions/{{version:name}}")] if MODEL in path else [path]


async def _with(handler: MindieHandler, state: MindieState, exchange: Exchange, services: Services) -> None:
    await handler(exchange, services, state)


def _render(error: ServingError) -> Response:
    return Response(503, b"", b"") if isinstance(error, NotHealthy) else errors.render(error)


def _answer_headers(path: str, request_id: str) -> Headers:
    return [(b"RequestUUID", secrets.token_hex(16).encode())]
