"""The grammar that a request asks for: vLLM's `structured_outputs`, its older `guided_decoding`, `guided_json` and the
like, or TensorRT-LLM's guide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inference.errors import InvalidRequest
from inference.generation import structured
from inference.vendors.vllm_structured import of_kind, structured_outputs

if TYPE_CHECKING:
    from inference.generation.requests import GrammarRequest

VLLM = ("structured_outputs", "guided_decoding")
OLDER = ("json", "regex", "choice", "grammar")
"""Kinds that were parameters by themselves, with `guided_` before their names."""
TYPE, GUIDE = "guided_decoding_guide_type", "guided_decoding_guide"
TYPES = ("json", "json_schema", "regex", "ebnf_grammar", "structural_tag")


def grammar_of(values: dict[str, Any]) -> GrammarRequest | None:
    """The grammar of the parameters; raises InvalidRequest or NotServed with the field."""
    found = [_vllm(values[name], name) for name in VLLM if values.get(name) is not None]
    found += [_older(kind, value) for kind in OLDER if (value := values.get(f"guided_{kind}")) is not None]
    if values.get(TYPE) is not None:
        found.append(_tensorrt_llm(values[TYPE], values.get(GUIDE)))
    elif values.get(GUIDE) is not None:
        raise InvalidRequest(f"{GUIDE} needs {TYPE}", GUIDE)
    if len(found) > 1:
        names = " and ".join(grammar.field for grammar in found)
        raise InvalidRequest(f"only one kind of structured output can be asked for, got {names}", found[1].field)
    return found[0] if found else None


def _older(kind: str, value: Any) -> GrammarRequest:
    """A parameter of its own, whose lists are JSON texts."""
    name = f"guided_{kind}"
    return of_kind(kind, structured.parsed(value, name) if kind == "choice" else value, name)


def _vllm(given: Any, name: str) -> GrammarRequest:
    """An object, or its JSON text: the values of `sampling_parameters` are texts."""
    value = structured.parsed(given, name)
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be a JSON object, or its text", name)
    return structured_outputs(value, name)


def _tensorrt_llm(kind: Any, guide: Any) -> GrammarRequest:
    if kind not in TYPES:
        raise InvalidRequest(f"{TYPE} must be one of {', '.join(TYPES)}, got {str(kind)[:40]}", TYPE)
    if kind == "json":
        return structured.json_schema({}, TYPE)
    if guide is None:
        raise InvalidRequest(f"{GUIDE} must be given for {kind}", GUIDE)
    if kind == "json_schema":
        return structured.json_schema(guide, GUIDE)
    if kind == "regex":
        return structured.regex(guide, GUIDE)
    if kind == "ebnf_grammar":
        return structured.grammar(guide, GUIDE)
    return structured.structural_tag(guide, GUIDE)
