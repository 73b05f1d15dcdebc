"""The OpenAPI document of a plane, made from its route table and the schemas of its bodies."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from inference.routing import Route


def document(routes: list[Route], version: str) -> dict[str, Any]:
    """OpenAPI 3.1."""
    schemas = [route.body for route in routes if route.body is not None]
    references, components = msgspec.json.schema_components(schemas, ref_template="#/components/schemas/{name}")
    by_schema = {id(schema): reference for schema, reference in zip(schemas, references, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation: dict[str, Any] = {
            "summary": route.summary,
            "operationId": f"{route.method.lower()}_{re.sub(r'[^a-z0-9]+', '_', route.path.lower()).strip('_') or 'root'}",
            "tags": [route.render.__module__.split(".")[-2]],
            "responses": {"200": {"description": "OK"}, "default": {"description": "An error in the dialect's shape"}},
        }
        names = re.findall(r"\{(\w+)\}", route.path)
        if names:
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        if route.body is not None:
            content = {"application/json": {"schema": by_schema[id(route.body)]}}
            operation["requestBody"] = {"required": True, "content": content}
        if route.scope is not None:
            operation["security"] = [{"bearer": []}]
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Dragoman", "version": version, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
    }
