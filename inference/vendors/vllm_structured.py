"""vLLM's `structured_outputs`, shared by its OpenAI routes and by Triton's vLLM backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inference.errors import InvalidRequest
from inference.generation import structured

if TYPE_CHECKING:
    from inference.generation.requests import GrammarRequest

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
OPTIONS = {"disable_any_whitespace": bool, "disable_additional_properties": bool, "whitespace_pattern": str}


def structured_outputs(given: dict[str, Any], field: str = "structured_outputs") -> GrammarRequest:
    """The grammar of the object, whose one kind and options are checked; raises InvalidRequest or NotServed."""
    kinds = [kind for kind in KINDS if given.get(kind) not in (None, False)]
    if len(kinds) != 1:
        raise InvalidRequest(f"{field}: exactly one of {', '.join(KINDS)} must be given, got {len(kinds)}.", field)
    for name, kind in OPTIONS.items():
        if given.get(name) is not None and not isinstance(given[name], kind):
            raise InvalidRequest(f"{field}: {name} must be a {kind.__name__}.", field)
    whitespace = given.get("whitespace_pattern") or None
    if given.get("disable_any_whitespace"):
        whitespace = ""
    value = given[kinds[0]]
    if given.get("disable_additional_properties") and kinds[0] == "json":
        value = structured.closed(structured.parsed(value, field), field)
    return of_kind(kinds[0], value, field, whitespace)


def of_kind(kind: str, value: Any, field: str, whitespace: str | None = None) -> GrammarRequest:
    """The grammar of one of KINDS."""
    if kind == "json":
        schema = structured.parsed(value, field)
        return structured.json_schema(structured.closed(schema, field, bare_too=False), field, whitespace)
    if kind == "regex":
        return structured.regex(value, field)
    if kind == "choice":
        return structured.choice(value, field)
    if kind == "grammar":
        return structured.grammar(value, field)
    if kind == "json_object":
        return structured.json_object(field, whitespace)
    return structured.structural_tag(value, field)
