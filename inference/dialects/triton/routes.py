"""The routes of this dialect on the front plane. Model names may contain slashes, so every path is anchored at its
end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inference.dialects.triton import answers, generate, http_infer, queries, repository, server_settings, shared_memory
from inference.dialects.triton.errors import STATUSES, render
from inference.dialects.triton.schema import (
    GenerateBody,
    IndexBody,
    InferBody,
    LoadBody,
    LogSettings,
    TraceSettings,
)
from inference.http.routing import Described, Empty, Never, Route, RouteSet

if TYPE_CHECKING:
    from inference.http.routing import Handler


def _get(path: str, handler: Handler, summary: str, answer: Any, scope: str | None = "infer") -> Route:
    return Route("GET", path, handler, render, summary, scope, described=Described(answer=answer))


def _of_model(
    method: str, suffix: str, handler: Handler, summary: str, body: type | None = None, **described: Any
) -> tuple[Route, ...]:
    """The route with a version and without; the one with a version first, because a model's name matches any text.

    `described`: the fields of `Described`.
    """
    forms = (f"/v2/models/{{model:path}}/versions/{{version}}{suffix}", f"/v2/models/{{model:path}}{suffix}")
    infers = method == "POST"
    told = Described(**described)
    return tuple(
        Route(method, path, handler, render, summary, body=body, needs_permit=infers, described=told) for path in forms
    )


def _repository(path: str, handler: Handler, summary: str, body: type, answer: Any) -> tuple[Route, ...]:
    """The route with the repository's name and without; there is one repository."""
    forms = (f"/v2/repository{path}", f"/v2/repository/{{repository}}{path}")
    told = Described(answer=answer)
    return tuple(
        Route("POST", form, handler, render, summary, scope="manage", body=body, described=told) for form in forms
    )


def _shared_memory(kind: str) -> tuple[Route, ...]:
    """The routes of an extension, for all regions and for one."""
    forms = (f"/v2/{kind}sharedmemory", f"/v2/{kind}sharedmemory/region/{{region}}")
    text = f"client shared memory ({kind})"
    return tuple(
        route
        for form in forms
        for route in (
            _get(f"{form}/status", shared_memory.status, f"List the regions of {text}", list[dict[str, Any]]),
            *(
                Route(
                    "POST",
                    f"{form}/{change}",
                    shared_memory.change,
                    render,
                    f"Refuse {text} (not served)",
                    described=Described(answer=Never),
                )
                for change in ("register", "unregister")
            ),
        )
    )


def _settings(path: str, handler: Handler, name: str, body: type, answer: Any) -> tuple[Route, ...]:
    """Reading and updating settings."""
    update = f"Update the {name} settings"
    return (
        _get(path, handler, f"Get the {name} settings", answer),
        Route("POST", path, handler, render, update, body=body, described=Described(answer=answer)),
    )


FRONT = RouteSet(
    (
        _get("/v2/health/live", queries.live, "Check whether the server runs", answers.ServerLive, None),
        _get("/v2/health/ready", queries.ready, "Check whether the server is ready", answers.ServerReady, None),
        _get("/v2", queries.server, "Describe the server", answers.ServerMetadata),
        _get("/v2/", queries.server, "Describe the server", answers.ServerMetadata),
        _get("/v2/models/stats", queries.all_statistics, "Get the statistics of all models", answers.ModelsStatistics),
        *_repository("/index", repository.http_index, "List the deployments", IndexBody, list[answers.RepositoryEntry]),
        *_repository("/models/{model:path}/load", repository.http_load, "Start a deployment", LoadBody, Empty),
        *_repository("/models/{model:path}/unload", repository.http_unload, "Stop a deployment", LoadBody, Empty),
        *_shared_memory("system"),
        *_shared_memory("cuda"),
        *_settings("/v2/logging", server_settings.log, "logging", LogSettings, answers.LogSetting),
        *_settings("/v2/trace/setting", server_settings.trace, "trace", TraceSettings, answers.TraceSetting),
        *_settings(
            "/v2/models/{model:path}/trace/setting", server_settings.trace, "trace", TraceSettings, answers.TraceSetting
        ),
        *_of_model("GET", "/ready", queries.ready_model, "Check whether a model is ready", answer=answers.ModelReady),
        *_of_model("GET", "/config", queries.config, "Get a model's configuration", answer=answers.ModelConfig),
        *_of_model("GET", "/stats", queries.statistics, "Get a model's statistics", answer=answers.ModelsStatistics),
        *_of_model(
            "POST", "/infer", http_infer.infer, "Run an inference with tensors", InferBody, answer=answers.InferResponse
        ),
        *_of_model("POST", "/generate", generate.generate, "Generate text", GenerateBody, answer=answers.TextResponse),
        *_of_model(
            "POST",
            "/generate_stream",
            generate.generate_stream,
            "Stream generated text",
            GenerateBody,
            frames=answers.TextResponse,
        ),
        *_of_model("GET", "", queries.model, "Get a model's metadata", answer=answers.ModelMetadata),
    ),
    render,
    STATUSES,
    prefixes=("/v2",),
)
