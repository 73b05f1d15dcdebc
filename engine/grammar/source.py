"""A client's grammar in llguidance's own form. Only grammar processes call this: none of it is bounded."""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import gbnf_to_lark


def source(kind: str, text: str) -> Any:
    """What `LLMatcher` takes for a `Grammar` of that kind; raises whatever the libraries raise for a bad one."""
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        choices = " | ".join(json.dumps(choice) for choice in json.loads(text))
        return LLMatcher.grammar_from_lark(f"start: {choices}")
    if kind == "structural_tag":
        tags = [
            StructTag(trigger=tag["trigger"], begin=tag["begin"], grammar=tag["schema"], end=tag["end"])
            for tag in json.loads(text)
        ]
        return LLMatcher.grammar_from_lark(StructTag.to_grammar(tags, assume_special=False))
    return LLMatcher.grammar_from_lark(gbnf_to_lark(text) if "::=" in text else text)
