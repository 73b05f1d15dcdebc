"""The OpenAPI document of a plane, built from its dialects' routes and body schemas."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from inference.http.routing import Empty, Never

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from inference.http.routing import Route, RouteSet


JSON, FRAMES = "application/json", "text/event-stream"
INFO = {"title": "Dragoman", "license": {"name": "Apache-2.0"}}


def of_vendor(route_sets: Mapping[str, RouteSet], name: str, version: str) -> dict[str, Any]:
    """The document that the vendor of the set of this name has: its title, license and tag, and no other vendor's routes."""
    told = route_sets[name].document
    assert told is not None
    chosen = {
        each: routes
        if each == name
        else replace(
            routes, routes=tuple(r for r in routes.routes if r.plain_path in told.others), tag=route_sets[name].tag
        )
        for each, routes in route_sets.items()
    }
    found = document({each: routes for each, routes in chosen.items() if routes.routes}, version)
    return {**found, "info": {**found["info"], "title": told.title, "license": told.license}, "tags": list(told.tags)}


def document(route_sets: Mapping[str, RouteSet], version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document of all sets, with the tag of each or its name.

    If dialects share a path, its operation describes all of them.
    """
    references, components = _schemas(route_sets.values())
    paths: dict[str, dict[str, Any]] = {}
    for name, routes in route_sets.items():
        error = references.get(id(routes.error), {"type": "object"})
        for route in routes.routes:
            methods = paths.setdefault(route.plain_path, {})
            operation = methods.setdefault(route.method.lower(), _operation(route))
            if (tag := routes.tag or name) not in operation["tags"]:
                operation["tags"].append(tag)
            if route.described.operation:
                operation["operationId"] = route.described.operation
            told = route.described
            for kind, schema in ((told.kind, told.answer), (FRAMES, told.frames)):
                if schema not in (None, Empty, Never):
                    _add_schema(operation["responses"]["200"], kind, references[id(schema)])
            for status in sorted(routes.statuses):
                text = "An error in the dialect's shape"
                _add_schema(operation["responses"].setdefault(str(status), {"description": text}), JSON, error)
            if route.body is not None:
                _add_schema(operation.setdefault("requestBody", {"required": True}), JSON, references[id(route.body)])
    return {
        "openapi": "3.1.0",
        "info": {**INFO, "version": version},
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
        "responses": {} if route.described.answer is Never else {"200": {"description": "OK"}},
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
        found += [s for schemas in (*named, (routes.error,)) for s in schemas if s not in (None, Empty, Never)]
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
