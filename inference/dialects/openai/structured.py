"""`response_format`, `structured_outputs` and its older aliases `guided_*`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from inference.errors import InvalidRequest
from inference.generation import structured
from inference.vendors import tgi_grammar

if TYPE_CHECKING:
    from inference.generation.requests import GrammarRequest

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
OPTIONS = {"disable_any_whitespace": bool, "disable_additional_properties": bool, "whitespace_pattern": str}


class StructuredFields(Protocol):
    """The fields of a body that ask for structured output."""

    response_format: dict[str, Any] | None
    structured_outputs: dict[str, Any] | None
    guided_json: Any
    guided_regex: Any
    guided_choice: Any
    guided_grammar: Any


def grammar_of(body: StructuredFields) -> GrammarRequest | None:
    """The grammar of the body; raises InvalidRequest or NotServed."""
    found: list[GrammarRequest] = []
    if body.response_format is not None and (grammar := _response_format(body.response_format)) is not None:
        found.append(grammar)
    if body.structured_outputs is not None:
        found.append(_structured_outputs(body.structured_outputs))
    aliases = {
        "json": body.guided_json,
        "regex": body.guided_regex,
        "choice": body.guided_choice,
        "grammar": body.guided_grammar,
    }
    found += [_kind(kind, value, f"guided_{kind}") for kind, value in aliases.items() if value is not None]
    if len(found) > 1:
        names = " and ".join(grammar.field for grammar in found)
        raise InvalidRequest(f"Only one kind of structured output can be asked for, got {names}.", found[1].field)
    return found[0] if found else None


def _response_format(given: dict[str, Any]) -> GrammarRequest | None:
    kind = given.get("type")
    if kind == "text":
        return None
    if tgi_grammar.in_tgis_form(given):
        return tgi_grammar.grammar_of(given, "response_format")
    if kind == "json_object":
        return structured.json_object("response_format")
    if kind == "json_schema":
        wrapper = given.get("json_schema")
        if not isinstance(wrapper, dict) or wrapper.get("schema") is None:
            raise InvalidRequest("response_format: json_schema.schema is required.", "response_format")
        return structured.json_schema(wrapper["schema"], "response_format")
    if kind == "structural_tag":
        return structured.structural_tag(given, "response_format")
    raise InvalidRequest(
        "response_format: type must be 'text', 'json_object', 'json_schema' or 'structural_tag'.", "response_format"
    )


def _structured_outputs(given: dict[str, Any]) -> GrammarRequest:
    field = "structured_outputs"
    kinds = [kind for kind in KINDS if given.get(kind) not in (None, False)]
    if len(kinds) != 1:
        raise InvalidRequest(f"{field}: exactly one of {', '.join(KINDS)} must be given, got {len(kinds)}.", field)
    for name, kind in OPTIONS.items():
        if given.get(name) is not None and not isinstance(given[name], kind):
            raise InvalidRequest(f"{field}: {name} must be a {kind.__name__}.", field)
    whitespace = given.get("whitespace_pattern") or structured.WHITESPACE
    if given.get("disable_any_whitespace"):
        whitespace = ""
    value = given[kinds[0]]
    if given.get("disable_additional_properties") and kinds[0] == "json":
        value = structured.closed(structured.parsed(value, field), field)
    return _kind(kinds[0], value, field, whitespace)


def _kind(kind: str, value: Any, field: str, whitespace: str = structured.WHITESPACE) -> GrammarRequest:
    if kind == "json":
        return structured.json_schema(value, field, whitespace)
    if kind == "regex":
        return structured.regex(value, field)
    if kind == "choice":
        return structured.choice(value, field)
    if kind == "grammar":
        return structured.grammar(value, field)
    if kind == "json_object":
        return structured.json_object(field, whitespace)
    return structured.structural_tag(value, field)
