"""Converts a client's grammar to llguidance's form. Only grammar processes call this, because the conversion is not
bounded in time or memory.
"""

from __future__ import annotations

import json
import re
from typing import Any

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import gbnf_to_lark

GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.M)
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.S)


def source(kind: str, text: str) -> Any:
    """The argument of `LLMatcher` for a `Grammar` of this kind; raises any exception of the libraries for a bad
    grammar.
    """
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
    if kind == "either":
        return _either([source(*member) for member in json.loads(text)])
    return LLMatcher.grammar_from_lark(gbnf_to_lark(_plain(text)) if GBNF_RULE.search(text) else text)


def _either(members: list[str]) -> str:
    """A grammar whose text has one of these, which are in llguidance's forms: Lark, or a JSON list of grammars whose
    first is the whole.
    """
    grammars: list[dict[str, Any]] = [
        {"name": "either", "lark_grammar": "start: " + " | ".join(f"@g{i}" for i in range(len(members)))}
    ]
    for number, member in enumerate(members):
        first, *others = (
            json.loads(member)["grammars"] if member.lstrip().startswith("{") else [{"lark_grammar": member}]
        )
        grammars += [{**first, "name": f"g{number}"}, *others]
    return json.dumps({"grammars": grammars})


def _plain(text: str) -> str:
    r"""GBNF with characters in place of \u and \U, which `gbnf_to_lark` reads as others if they have zeros."""

    def character(found: re.Match[str]) -> str:
        digits = found[1] or found[2]
        if digits is None:
            return found[0]
        code = int(digits, 16)
        return f"\\x{code:02x}" if code < 0x80 else chr(code)

    return ESCAPE.sub(character, text)
