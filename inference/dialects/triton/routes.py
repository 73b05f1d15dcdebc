"""The routes of this dialect on the front plane. Model names may contain slashes, so every path is anchored at its
end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference.dialects.triton import generate, http_infer, queries, repository
from inference.dialects.triton.errors import STATUSES, render
from inference.dialects.triton.schema import GenerateBody, IndexBody, InferBody, LoadBody
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


_memory = ("/v2/systemsharedmemory/{rest:path}", "/v2/cudasharedmemory/{rest:path}")

FRONT = RouteSet(
    (
        Route("GET", "/v2/health/live", queries.live, render, "Check whether the server runs", scope=None),
        Route("GET", "/v2/health/ready", queries.ready, render, "Check whether the server is ready", scope=None),
        Route("GET", "/v2", queries.server, render, "Describe the server"),
        Route("GET", "/v2/models/stats", queries.all_statistics, render, "Get the statistics of all models"),
        *_repository("/index", repository.http_index, "List the deployments", IndexBody),
        *_repository("/models/{model:path}/load", repository.http_load, "Start a deployment", LoadBody),
        *_repository("/models/{model:path}/unload", repository.http_unload, "Stop a deployment", LoadBody),
        *(
            Route(method, path, queries.refuse_shared_memory, render, "Refuse the request (not served)")
            for path in _memory
            for method in ("GET", "POST")
        ),
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
