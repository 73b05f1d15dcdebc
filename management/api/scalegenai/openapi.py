"""The API as an OpenAPI 3.1 document, from the same schema that checks bodies."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pydantic.json_schema import models_json_schema

from management.api.scalegenai.schema import DeploymentIn, ScaleUpIn, UpdateIn

Path = tuple[str, str, str, type | None]
PATHS: tuple[Path, ...] = (
    ("get", "/sg_inf/list", "List the deployments", None),
    ("post", "/sg_inf/create", "Create and start a deployment", DeploymentIn),
    ("get", "/sg_inf/supported_models", "List the registered models", None),
    ("get", "/sg_inf/{id}", "Get a deployment", None),
    ("delete", "/sg_inf/{id}", "Delete a deployment", None),
    ("put", "/sg_inf/{id}", "Change a deployment", UpdateIn),
    ("patch", "/sg_inf/{id}", "Change a deployment", UpdateIn),
    ("post", "/sg_inf/{id}", "Change a deployment", UpdateIn),
    ("post", "/sg_inf/{id}/update", "Change a deployment", UpdateIn),
    ("post", "/sg_inf/{id}/scale/up", "Add workers, or wake a deployment", ScaleUpIn),
    ("post", "/sg_inf/{id}/scale/zero", "Remove all workers", None),
    ("get", "/sg_inf/{id}/gpu_nodes_ips", "List the machines of a deployment", None),
    ("get", "/secret/AUTH_ENDPOINT_KEY_{id}", "Get the API key of a deployment's endpoint", None),
    ("post", "/user/verify", "Tell who calls", None),
)
NO_CONTENT_PATHS = frozenset({"/sg_inf/list", "/sg_inf/{id}"})
FORCE_PATHS = frozenset({("delete", "/sg_inf/{id}"), ("post", "/sg_inf/{id}/scale/zero")})
STATUSES = ("400", "401", "403", "404", "409", "413", "422", "503", "507")


@lru_cache
def document() -> dict[str, Any]:
    """The document; it is the same for every caller."""
    models = [DeploymentIn, UpdateIn, ScaleUpIn]
    references, schemas = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for method, path, summary, model in PATHS:
        operation = _operation(method, path, summary)
        if model is not None:
            content = {"application/json": {"schema": references[(model, "validation")]}}
            operation["requestBody"] = {"required": model is not ScaleUpIn, "content": content}
        paths.setdefault(path, {})[method] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "ScaleGenAI inference API", "version": "0.0.46"},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(method: str, path: str, summary: str) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": {"description": "OK"}}
    if method == "get" and path in NO_CONTENT_PATHS:
        responses["204"] = {"description": "None found"}
    responses |= {status: {"description": "Refused: success, message, and detail by field"} for status in STATUSES}
    parameters = (
        [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}] if "{id}" in path else []
    )
    if (method, path) in FORCE_PATHS:
        parameters.append({"name": "force", "in": "query", "required": False, "schema": {"type": "string"}})
    name = path.replace("{id}", "id").strip("/").replace("/", "_").lower()
    return {
        "summary": summary,
        "operationId": f"{method}_{name}",
        "tags": ["scalegenai"],
        "security": [{"bearer": []}],
        "parameters": parameters,
        "responses": responses,
    }
