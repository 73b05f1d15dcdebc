"""The OpenAPI document of a plane, built from its dialects' routes and body schemas."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from inference.http.routing import Route, RouteSet


JSON, FRAMES = "application/json", "text/event-stream"


def document(route_sets: Mapping[str, RouteSet], version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document, with the tag of each route set or its name.

    If dialects share a path, its operation describes all of them.
    """
    references, components = _schemas(route_sets.values())
    paths: dict[str, dict[str, Any]] = {}
    answers: dict[tuple[str, str, str], list[Any]] = {}
    for name, routes in route_sets.items():
        error = references.get(id(routes.error), {"type": "object"})
        for route in routes.routes:
            methods = paths.setdefault(route.plain_path, {})
            operation = methods.setdefault(route.method.lower(), _operation(route))
            if (tag := routes.tag or name) not in operation["tags"]:
                operation["tags"].append(tag)
            if route.described.operation:
                operation["operationId"] = route.described.operation
            for kind, schema in ((JSON, route.described.answer), (FRAMES, route.described.frames)):
                answers.setdefault((route.plain_path, route.method.lower(), kind), []).append(
                    None if schema is None else references[id(schema)]
                )
            for status in sorted(routes.statuses):
                text = "An error in the dialect's shape"
                _add_schema(operation["responses"].setdefault(str(status), {"description": text}), JSON, error)
            if route.body is not None:
                _add_schema(operation.setdefault("requestBody", {"required": True}), JSON, references[id(route.body)])
    for (path, method, kind), schemas in answers.items():
        for reference in schemas if None not in schemas else ():  # else one dialect's answers are not described
            _add_schema(paths[path][method]["responses"]["200"], kind, reference)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Dragoman", "version": version, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(route: Route) -> dict[str, Any]:
    name = re.sub(r"[^a-z0-9]+", "_", route.plain_path.lower()).strip("_") or "root"
    if route.plain_path.endswith("/") and route.plain_path != "/":
        name += "_slash"  # an id must be unique, and the path without it may exist
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}_{name}",
        "tags": [],
        "responses": {"200": {"description": "OK"}},
    }
    if route.parameters:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in route.parameters
        ]
    if route.scope is not None:
        operation["security"] = [{"bearer": []}]
    return operation


def _schemas(route_sets: Iterable[RouteSet]) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    """The reference of every schema by its id, and the schemas that they refer to."""
    found: list[Any] = []
    for routes in route_sets:
        named = [(route.body, route.described.answer, route.described.frames) for route in routes.routes]
        found += [schema for schemas in (*named, (routes.error,)) for schema in schemas if schema is not None]
    references, components = msgspec.json.schema_components(found, ref_template="#/components/schemas/{name}")
    return {id(schema): reference for schema, reference in zip(found, references, strict=True)}, components


def _add_schema(described: dict[str, Any], kind: str, reference: dict[str, Any]) -> None:
    """Add a schema to a body or response of this content type."""
    content = described.setdefault("content", {})
    known = content.get(kind)
    if known is None:
        content[kind] = {"schema": reference}
        return
    others = known["schema"].get("anyOf", [known["schema"]])
    if reference not in others:
        known["schema"] = {"anyOf": [*others, reference]}
