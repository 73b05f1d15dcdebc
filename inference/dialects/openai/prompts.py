"""The four forms of `prompt` and `input`: a text, ids, a list of texts, a list of lists of ids."""

from __future__ import annotations

from typing import Any

from inference.errors import InvalidRequest
from inference.generation.requests import Prompt, TextPrompt, TokenPrompt
from inference.http.validation import check_count

PROMPT_FORMS = [
    {"type": "string"},
    {"type": "array", "items": {"type": "string"}},
    {"type": "array", "items": {"type": "integer"}},
    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
]


def parse_forms(value: Any, field: str, limit: int, add_special_tokens: bool) -> list[Prompt]:
    """The prompts in any of the forms, at most `limit`; raises InvalidRequest for `field`."""
    items = value if isinstance(value, list) and not _is_ids(value) else [value]
    check_count(field, items, limit)
    prompts: list[Prompt] = []
    for item in items:
        if isinstance(item, str):
            prompts.append(TextPrompt(item, add_special_tokens))
        elif isinstance(item, list) and _is_ids(item):
            prompts.append(TokenPrompt(item))
        else:
            text = f"{field} must be a string, a list of token ids, or a list of either."
            raise InvalidRequest(text, field)
    return prompts


def is_empty(value: Any) -> bool:
    """Whether the value, or an entry of it, is empty."""
    if not value:
        return True
    return isinstance(value, list) and not _is_ids(value) and not all(value)


def _is_ids(value: list[Any]) -> bool:
    return set(map(type, value)) <= {int}  # several times as fast as a loop; lists of ids are long
