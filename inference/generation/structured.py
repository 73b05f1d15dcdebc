"""Builds the GrammarRequest of a structured output. Each dialect names its own fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from engine.sampling.params import Grammar
from inference.errors import InvalidRequest
from inference.generation.requests import GrammarRequest

MAX_CHARACTERS = 1 << 16
MAX_CHOICES = 1024
MAX_DEPTH = 100
VALUES = ("const", "enum", "default", "examples")
"""Keys of a JSON schema that have no schemas."""
MAPPINGS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Those that have schemas by names."""
CONJUNCTIONS, ALTERNATIVES = ("allOf", "if", "then", "else", "not"), ("anyOf", "oneOf")
"""Those whose schemas a value must fit beside its own schema; of the latter, one of them."""
INDENTATION = 4
"""The most blanks of indentation for a level."""
UNKNOWN_LEVELS = 8
"""Levels of a value whose schema does not say how deep it is."""


def json_schema(schema: Any, field: str, whitespace: str | None = None) -> GrammarRequest:
    """A JSON schema, as an object or as text. `whitespace` is a regular expression of the white space between the parts
    of a value; None allows one blank, or one line break with the indentation that the schema's levels can need: models
    under a grammar would otherwise fill their tokens with it.
    """
    schema = parsed(schema, field)
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{field}: a JSON schema must be an object.", field)
    return _limited("json_schema", _encoded(_spaced(schema, field, whitespace), field), field)


def _spaced(schema: dict[str, Any], field: str, whitespace: str | None = None) -> dict[str, Any]:
    if whitespace is None:
        levels = _levels(schema, field)
        whitespace = rf"( |\n(\t{{0,{levels}}}| {{0,{INDENTATION * levels}}}))?"
    return {"x-guidance": {"whitespace_pattern": whitespace}, **schema}


def _levels(schema: Any, field: str, depth: int = 0) -> int:
    """How many objects and lists can enclose a part of the value. Raises InvalidRequest if the schema is nested too
    deeply.
    """
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"{field}: a schema may be nested {MAX_DEPTH} levels deep.", field)
    if not isinstance(schema, dict):
        return 0 if schema is False else UNKNOWN_LEVELS
    if "const" in schema or "enum" in schema:
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
        return UNKNOWN_LEVELS if any(isinstance(value, dict | list) for value in values) else 0
    if "$ref" in schema:  # which may lead back to where it stands
        return UNKNOWN_LEVELS
    kinds = schema.get("type")
    if isinstance(kinds, str) and kinds not in ("object", "array"):
        return 0
    inner: list[Any] = []
    for key in MAPPINGS[:2]:
        found = schema.get(key)
        inner += found.values() if isinstance(found, dict) else []
    if schema.get("additionalProperties") not in (None, False) or (kinds == "object" and not inner):
        inner.append(schema.get("additionalProperties", True))
    items = [schema[key] for key in ("items", "prefixItems") if key in schema]
    inner += [each for found in items for each in (found if isinstance(found, list) else [found])]
    if kinds == "array" and not items:
        inner.append(True)
    same = [schema[key] for key in (*CONJUNCTIONS, *ALTERNATIVES) if key in schema]
    beside = [each for found in same for each in (found if isinstance(found, list) else [found])]
    if not inner and not beside:
        return UNKNOWN_LEVELS
    below = 1 + max((_levels(each, field, depth + 1) for each in inner), default=-1)
    return min(UNKNOWN_LEVELS, max([below, *(_levels(each, field, depth + 1) for each in beside)]))


def json_object(field: str, whitespace: str | None = None) -> GrammarRequest:
    """Any JSON object."""
    return json_schema({"type": "object"}, field, whitespace)


def regex(pattern: Any, field: str) -> GrammarRequest:
    """A regular expression that matches the whole output."""
    if not isinstance(pattern, str) or not pattern:
        raise InvalidRequest(f"{field}: a regular expression must be a non-empty string.", field)
    return _limited("regex", pattern, field)


def choice(choices: Any, field: str) -> GrammarRequest:
    """One of several texts."""
    texts = isinstance(choices, list) and all(isinstance(text, str) and text for text in choices)
    if not texts or not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequest(f"{field}: choices must be a list of 1 to {MAX_CHOICES} non-empty strings.", field)
    return _limited("choice", msgspec.json.encode(choices).decode(), field)


def grammar(text: Any, field: str) -> GrammarRequest:
    """A context-free grammar, in Lark's format or GBNF."""
    if not isinstance(text, str) or not text:
        raise InvalidRequest(f"{field}: a grammar must be a non-empty string.", field)
    return _limited("grammar", text, field)


def parsed(value: Any, field: str) -> Any:
    """The value of a JSON text; any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{field}: this is not valid JSON: {error}", field) from error


def closed(schema: Any, field: str, bare_too: bool = True) -> Any:
    """The schema, with `additionalProperties` set to false in every object that does not set it. Objects without properties stay open
    unless `bare_too`, and those that must fit several schemas always do: each of these names some of the properties.
    """
    return _closed(schema, bare_too, False, set(_conjoined(schema, field, 0, False)))


def _closed(schema: Any, bare_too: bool, conjoined: bool, shared: set[str]) -> Any:
    """`conjoined`: the value must fit other schemas too; `shared`: the references of such schemas."""
    if isinstance(schema, list):
        return [_closed(item, bare_too, conjoined, shared) for item in schema]
    if not isinstance(schema, dict):
        return schema
    several = conjoined or _has_several(schema)
    inner: dict[str, Any] = {}
    for key, value in schema.items():
        if key in VALUES:
            inner[key] = value
        elif key in MAPPINGS:
            inner[key] = {
                name: _closed(each, bare_too, f"#/{key}/{name}" in shared, shared) for name, each in value.items()
            }
        else:
            same_value = key in CONJUNCTIONS or (several and key in ALTERNATIVES)
            inner[key] = _closed(value, bare_too, same_value, shared)
    if not several and (isinstance(schema.get("properties"), dict) or (bare_too and schema.get("type") == "object")):
        inner.setdefault("additionalProperties", False)
    return inner


def _conjoined(schema: Any, field: str, depth: int, conjoined: bool) -> Iterator[str]:
    """The references of schemas whose value must fit others too. Raises InvalidRequest if a schema is nested too deeply or is none."""
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"{field}: a schema may be nested {MAX_DEPTH} levels deep.", field)
    if isinstance(schema, list):
        for item in schema:
            yield from _conjoined(item, field, depth + 1, conjoined)
    elif isinstance(schema, dict):
        several = conjoined or _has_several(schema)
        if several and isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for key, value in schema.items():
            if key in MAPPINGS:
                if not isinstance(value, dict):
                    raise InvalidRequest(f"{field}: {key} of a schema must be an object.", field)
                yield from _conjoined([*value.values()], field, depth, False)
            elif key not in VALUES:
                same_value = key in CONJUNCTIONS or (several and key in ALTERNATIVES)
                yield from _conjoined(value, field, depth + 1, same_value)


def _has_several(schema: dict[str, Any]) -> bool:
    """Whether its value must fit further schemas beside its own properties."""
    others = [key for key in (*CONJUNCTIONS, *ALTERNATIVES, "$ref", "patternProperties") if key in schema]
    return "allOf" in others or "if" in others or bool(others and "properties" in schema)


def structural_tag(value: Any, field: str) -> GrammarRequest:
    """Free text, in which each of `triggers` starts one of `structures` ({begin, schema, end}), in vLLM's older
    format.
    """
    value = parsed(value, field)
    structures = value.get("structures") if isinstance(value, dict) else None
    triggers = value.get("triggers") if isinstance(value, dict) else None
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures or not triggers:
        raise InvalidRequest(f"{field}: a structural tag needs the lists `structures` and `triggers`.", field)
    if len(structures) > MAX_CHOICES or not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise InvalidRequest(
            f"{field}: triggers must be non-empty strings, and structures at most {MAX_CHOICES}.", field
        )
    return _limited("structural_tag", _encoded([_tag(t, triggers, field) for t in structures], field), field)


def _tag(structure: Any, triggers: list[str], field: str) -> dict[str, Any]:
    if not isinstance(structure, dict) or not isinstance(structure.get("schema"), dict):
        raise InvalidRequest(f"{field}: each structure needs a `begin`, a `schema` and an `end`.", field)
    begin, end = structure.get("begin"), structure.get("end")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise InvalidRequest(f"{field}: `begin` and `end` of a structure must be strings.", field)
    # The shortest is the one that is complete first.
    trigger = min((t for t in triggers if begin.startswith(t)), key=len, default=None)
    if trigger is None:
        raise InvalidRequest(f"{field}: the structure {begin[:60]!r} begins with none of the triggers.", field)
    return {"trigger": trigger, "begin": begin, "schema": _spaced(structure["schema"], field), "end": end}


def _encoded(value: Any, field: str) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except RecursionError as error:
        raise InvalidRequest(f"{field}: the schema is nested too deeply.", field) from error


def _limited(kind: Any, text: str, field: str) -> GrammarRequest:
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequest(f"{field}: at most {MAX_CHARACTERS} characters are allowed, got {len(text)}.", field)
    return GrammarRequest(Grammar(kind, text), field)
