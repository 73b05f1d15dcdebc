"""The routes of this dialect on the front plane. Model names may contain slashes, so every path is anchored at its
end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference.dialects.triton import generate, http_infer, queries, repository, server_settings, shared_memory
from inference.dialects.triton.errors import STATUSES, render
from inference.dialects.triton.schema import (
    GenerateBody,
    IndexBody,
    InferBody,
    LoadBody,
    LogSettings,
    TraceSettings,
)
from inference.http.routing import Route, RouteSet

if TYPE_CHECKING:
    from inference.http.routing import Handler


def _of_model(method: str, suffix: str, handler: Handler, summary: str, body: type | None = None) -> tuple[Route, ...]:
    """The route with a version and without; the one with a version first, because a model's name matches any text."""
    forms = (f"/v2/models/{{model:path}}/versions/{{version}}{suffix}", f"/v2/models/{{model:path}}{suffix}")
    infers = method == "POST"
    return tuple(Route(method, path, handler, render, summary, body=body, needs_permit=infers) for path in forms)


def _repository(path: str, handler: Handler, summary: str, body: type) -> tuple[Route, ...]:
    """The route with the repository's name and without; there is one repository."""
    forms = (f"/v2/repository{path}", f"/v2/repository/{{repository}}{path}")
    return tuple(Route("POST", form, handler, render, summary, scope="manage", body=body) for form in forms)


def _shared_memory(kind: str) -> tuple[Route, ...]:
    """The routes of an extension, for all regions and for one."""
    forms = (f"/v2/{kind}sharedmemory", f"/v2/{kind}sharedmemory/region/{{region}}")
    text = f"client shared memory ({kind})"
    return tuple(
        route
        for form in forms
        for route in (
            Route("GET", f"{form}/status", shared_memory.status, render, f"List the regions of {text}"),
            Route("POST", f"{form}/register", shared_memory.change, render, f"Refuse {text} (not served)"),
            Route("POST", f"{form}/unregister", shared_memory.change, render, f"Refuse {text} (not served)"),
        )
    )


def _settings(path: str, handler: Handler, name: str, body: type) -> tuple[Route, ...]:
    """Reading and updating settings."""
    return (
        Route("GET", path, handler, render, f"Get the {name} settings"),
        Route("POST", path, handler, render, f"Update the {name} settings", body=body),
    )


FRONT = RouteSet(
    (
        Route("GET", "/v2/health/live", queries.live, render, "Check whether the server runs", scope=None),
        Route("GET", "/v2/health/ready", queries.ready, render, "Check whether the server is ready", scope=None),
        Route("GET", "/v2", queries.server, render, "Describe the server"),
        Route("GET", "/v2/", queries.server, render, "Describe the server"),
        Route("GET", "/v2/models/stats", queries.all_statistics, render, "Get the statistics of all models"),
        *_repository("/index", repository.http_index, "List the deployments", IndexBody),
        *_repository("/models/{model:path}/load", repository.http_load, "Start a deployment", LoadBody),
        *_repository("/models/{model:path}/unload", repository.http_unload, "Stop a deployment", LoadBody),
        *_shared_memory("system"),
        *_shared_memory("cuda"),
        *_settings("/v2/logging", server_settings.log, "logging", LogSettings),
        *_settings("/v2/trace/setting", server_settings.trace, "trace", TraceSettings),
        *_settings("/v2/models/{model:path}/trace/setting", server_settings.trace, "trace", TraceSettings),
        *_of_model("GET", "/ready", queries.ready_model, "Check whether a model is ready"),
        *_of_model("GET", "/config", queries.config, "Get a model's configuration"),
        *_of_model("GET", "/stats", queries.statistics, "Get a model's statistics"),
        *_of_model("POST", "/infer", http_infer.infer, "Run an inference with tensors", InferBody),
        *_of_model("POST", "/generate", generate.generate, "Generate text", GenerateBody),
        *_of_model("POST", "/generate_stream", generate.generate_stream, "Stream generated text", GenerateBody),
        *_of_model("GET", "", queries.model, "Get a model's metadata"),
    ),
    render,
    STATUSES,
    prefixes=("/v2",),
)
