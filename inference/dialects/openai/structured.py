"""`response_format`, `structured_outputs` and its older aliases `guided_*`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from inference.errors import InvalidRequest
from inference.generation import structured
from inference.vendors import tgi_grammar
from inference.vendors.vllm_structured import of_kind, structured_outputs

if TYPE_CHECKING:
    from inference.generation.requests import GrammarRequest

FIELD = "response_format"


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
        found.append(structured_outputs(body.structured_outputs))
    else:  # clients of every version of vLLM send both: it ignores the form that it does not know
        aliases = {
            "json": body.guided_json,
            "regex": body.guided_regex,
            "choice": body.guided_choice,
            "grammar": body.guided_grammar,
        }
        found += [of_kind(kind, value, f"guided_{kind}") for kind, value in aliases.items() if value is not None]
    if len(found) > 1:
        names = " and ".join(grammar.field for grammar in found)
        raise InvalidRequest(f"Only one kind of structured output can be asked for, got {names}.", found[1].field)
    return found[0] if found else None


def _response_format(given: dict[str, Any]) -> GrammarRequest | None:
    kind = given.get("type")
    if kind == "text":
        return None
    if tgi_grammar.in_tgis_form(given):
        return tgi_grammar.grammar_of(given, FIELD)
    if kind == "json_object":
        schema = given.get("schema")  # as langchain-huggingface sends it
        return structured.json_object(FIELD) if schema is None else of_kind("json", schema, FIELD)
    if kind == "json_schema":
        wrapper = given.get("json_schema")
        if not isinstance(wrapper, dict) or wrapper.get("schema") is None:
            raise InvalidRequest("response_format: json_schema.schema is required.", FIELD)
        return of_kind("json", wrapper["schema"], FIELD)
    if kind == "structural_tag":
        return structured.structural_tag(given, FIELD)
    raise InvalidRequest(
        "response_format: type must be 'text', 'json_object', 'json_schema' or 'structural_tag'.", FIELD
    )
