"""The OpenAPI document of a plane, built from its dialects' routes and body schemas."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inference.http.routing import Route, RouteSet


def document(route_sets: Mapping[str, RouteSet], version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document, with the name of each route set as its tag.

    If dialects share a path, its operation describes all of them.
    """
    schemas = [route.body for routes in route_sets.values() for route in routes.routes if route.body is not None]
    references, components = msgspec.json.schema_components(schemas, ref_template="#/components/schemas/{name}")
    by_schema = {id(schema): reference for schema, reference in zip(schemas, references, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for name, routes in route_sets.items():
        for route in routes.routes:
            methods = paths.setdefault(route.plain_path, {})
            body = None if route.body is None else by_schema[id(route.body)]
            operation = methods.setdefault(route.method.lower(), _operation(route))
            if name not in operation["tags"]:
                operation["tags"].append(name)
            operation["responses"].update(_responses(routes))
            if body is not None:
                _add_body(operation, body)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Dragoman", "version": version, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(route: Route) -> dict[str, Any]:
    name = re.sub(r"[^a-z0-9]+", "_", route.plain_path.lower()).strip("_") or "root"
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


def _responses(routes: RouteSet) -> dict[str, Any]:
    return {str(status): {"description": "An error in the dialect's shape"} for status in sorted(routes.statuses)}


def _add_body(operation: dict[str, Any], reference: dict[str, Any]) -> None:
    """Add another body schema to an operation."""
    known = operation.get("requestBody")
    schema = reference
    if known is not None:
        before = known["content"]["application/json"]["schema"]
        schema = {"anyOf": [*before.get("anyOf", [before]), reference]}
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
