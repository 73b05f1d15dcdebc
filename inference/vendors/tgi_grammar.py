"""TGI's grammars: `grammar` of its own routes, and the same forms as `response_format`, which huggingface_hub sends.

The router turns a schema into a regular expression: whatever has `properties` is an object that holds these keys and no
others, whether or not the schema says so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from inference.errors import InvalidRequest
from inference.generation import structured

if TYPE_CHECKING:
    from inference.generation.requests import GrammarRequest

SCHEMAS = ("json", "json_object", "json_schema")
KINDS = (*SCHEMAS, "regex")
INVALID = "grammar is not valid"
"""How the router begins its errors, in place of a field's name."""
WHITESPACE = " ?"
"""The router allows one space, and no line breaks."""
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value has a schema under each of its names."""
NESTED = ("items", "prefixItems", "contains", "anyOf", "oneOf", "additionalProperties")
"""Keywords whose value is a schema, or a list of them, of a value of its own."""
COMBINED = ("allOf", "anyOf", "oneOf", "$ref", "if", "patternProperties")
"""Keywords by which an object may have keys besides its `properties`."""


def in_tgis_form(given: dict[str, Any]) -> bool:
    """Whether a `response_format` is TGI's and not OpenAI's."""
    return given.get("type") in ("json", "regex") or given.get("value") is not None


def grammar_of(given: dict[str, Any], field: str) -> GrammarRequest:
    """A schema as object or text (`json`, `json_object`), one in a wrapper with `schema` (`json_schema`), or a `regex`.

    Raises InvalidRequest with the router's texts.
    """
    kind, value = given.get("type"), given.get("value")
    if kind == "json_schema" and isinstance(value, dict):
        value = value.get("schema")
    expected = str if kind == "regex" else dict | str
    if kind not in KINDS or not isinstance(value, expected):
        raise InvalidRequest("grammar is not supported", field)
    try:
        found = structured.regex(value, INVALID) if kind == "regex" else _schema(value)
    except InvalidRequest as error:  # whose text begins with the router's words
        raise InvalidRequest(error.message, field) from error
    return replace(found, field=field)


def invalid_grammar(reason: str, field: str) -> InvalidRequest:
    """The router's error."""
    return InvalidRequest(f"{INVALID}: {reason}", field)


def completed(schema: Any, field: str, depth: int = 0) -> Any:
    """The schema as the router understands it: every one with `properties` is a closed object."""
    if depth > structured.MAX_DEPTH:
        raise InvalidRequest(f"{INVALID}: a schema may be nested {structured.MAX_DEPTH} levels deep.", field)
    if isinstance(schema, list):
        return [completed(item, field, depth + 1) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = dict(schema)
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            inner[key] = {name: completed(each, field, depth + 1) for name, each in value.items()}
        elif key in NESTED:
            inner[key] = completed(value, field, depth + 1)
    if isinstance(schema.get("properties"), dict):
        inner["type"] = "object"
        if not any(key in schema for key in COMBINED):
            inner["additionalProperties"] = False
    return inner


def _schema(value: dict[str, Any] | str) -> GrammarRequest:
    try:
        schema = msgspec.json.decode(value) if isinstance(value, str) else value
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid_grammar(str(error), INVALID) from error
    if not isinstance(schema, dict) or "properties" not in schema:
        raise invalid_grammar("Grammar must have a 'properties' field", INVALID)
    return structured.json_schema(completed(schema, INVALID), INVALID, WHITESPACE)
