"""The grammar of an answer that may call tools and else has a format: "a call of these tools, or the format".

Without it a format would make the calls of `tool_choice` "auto" impossible, and agents would never get one.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from engine.sampling.params import Grammar
from inference.chat.call_styles import TAGS
from inference.chat.tools import any_call, list_of_calls, may_call, named_tool, parameters
from inference.generation import structured
from inference.generation.requests import GrammarRequest

if TYPE_CHECKING:
    from inference.chat.tools import Choice, Tools
    from inference.workers.tokenizer import ModelTokenizer

Functions = list[dict[str, Any]]
LENIENT = {"lenient": True}
"""Calls that are not forced need no strict schemas: what a grammar cannot enforce is left to the model, as without a
format.
"""


def with_calls(
    form: GrammarRequest | None, tools: Tools, choice: Choice, parallel: bool, tokenizer: ModelTokenizer
) -> GrammarRequest | None:
    """The grammar `form` of an answer, with the calls that the model may make in its place. A forced call has a grammar
    of its own (`inference.chat.tools.tool_grammar`), which comes as `form` and stays as it is.
    """
    if form is None or not may_call(tools, choice) or choice == "required" or named_tool(choice) is not None:
        return form
    functions = [tool["function"] for tool in tools or []]
    calls = CALLS[tokenizer.tool_style](functions, parallel, tokenizer)
    members = [("grammar", calls), (form.grammar.kind, form.grammar.text)]
    return GrammarRequest(Grammar("either", msgspec.json.encode(members).decode()), form.field)


def _hermes(functions: Functions, parallel: bool, tokenizer: ModelTokenizer) -> str:
    begin, end = _tag(TAGS["hermes"], tokenizer), _tag("</tool_call>", tokenizer)
    repeated = '("\\n"? call)*' if parallel else ""
    body = _json(any_call(functions, "arguments"))
    return f'start: call {repeated}\ncall: {begin} "\\n"? body "\\n"? {end}\nbody: {body}\n'


def _llama3(functions: Functions, parallel: bool, tokenizer: ModelTokenizer) -> str:
    begin = f"{_tag(TAGS['llama3'], tokenizer)}?" if tokenizer.fast.token_to_id(TAGS["llama3"]) is not None else ""
    repeated = '(("\\n" | ";" " "?) call)*' if parallel else ""
    return f"start: {begin} call {repeated}\ncall: {_json(any_call(functions, 'parameters'))}\n"


def _mistral(functions: Functions, parallel: bool, tokenizer: ModelTokenizer) -> str:
    begin = _tag(TAGS["mistral"], tokenizer)
    separator = _tag("[ARGS]", tokenizer) + "?"
    named = [f"{json.dumps(function['name'])} {separator} {_json(parameters(function))}" for function in functions]
    repeated = f"({begin} named)*" if parallel else ""
    listed = _json(list_of_calls(functions, parallel))
    return f"start: {begin} (listed | named {repeated})\nlisted: {listed}\nnamed: {' | '.join(named)}\n"


CALLS = {"hermes": _hermes, "llama3": _llama3, "mistral": _mistral}


def _tag(text: str, tokenizer: ModelTokenizer) -> str:
    """A tag as a symbol of Lark: one token, if the vocabulary has it, else its characters."""
    token = tokenizer.fast.token_to_id(text)
    return json.dumps(text) if token is None else f"<[{token}]>"


def _json(schema: dict[str, Any]) -> str:
    spaced = json.loads(structured.json_schema(schema, "tools").grammar.text)
    return "%json " + json.dumps({**spaced, "x-guidance": {**spaced["x-guidance"], **LENIENT}})
