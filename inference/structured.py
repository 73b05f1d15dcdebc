"""What a client asks the output to look like, as the engine's Grammar. Each dialect names its own fields."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.sampling_params import Grammar
from inference.errors import InvalidRequest

MAX_CHARACTERS = 1 << 16
MAX_CHOICES = 1024
WHITESPACE = r"[ \t\n\r]{0,20}"
"""Between the parts of a JSON value; a small model would go on with blank lines for ever if it could."""


def json_schema(schema: Any, field: str, whitespace: str = WHITESPACE) -> Grammar:
    """A JSON schema, as an object or as text; `whitespace` is what may stand between the parts of a value."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"{field}: the schema is not valid JSON: {error}", field) from error
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{field}: a JSON schema must be an object.", field)
    schema = {"x-guidance": {"whitespace_pattern": whitespace}, **schema}
    return _limited("json_schema", msgspec.json.encode(schema).decode(), field)


def json_object(field: str, whitespace: str = WHITESPACE) -> Grammar:
    """Any JSON object."""
    return json_schema({"type": "object"}, field, whitespace)


def regex(pattern: Any, field: str) -> Grammar:
    """A regular expression that the whole output matches."""
    if not isinstance(pattern, str) or not pattern:
        raise InvalidRequest(f"{field}: a regular expression must be a non-empty string.", field)
    return _limited("regex", pattern, field)


def choice(choices: Any, field: str) -> Grammar:
    """One of several texts."""
    texts = isinstance(choices, list) and all(isinstance(text, str) and text for text in choices)
    if not texts or not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequest(f"{field}: choices must be a list of 1 to {MAX_CHOICES} non-empty strings.", field)
    return _limited("choice", msgspec.json.encode(choices).decode(), field)


def grammar(text: Any, field: str) -> Grammar:
    """A context-free grammar, in Lark's form or GBNF's."""
    if not isinstance(text, str) or not text:
        raise InvalidRequest(f"{field}: a grammar must be a non-empty string.", field)
    return _limited("grammar", text, field)


def _limited(kind: Any, text: str, field: str) -> Grammar:
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequest(f"{field}: at most {MAX_CHARACTERS} characters are allowed, got {len(text)}.", field)
    return Grammar(kind, text)
