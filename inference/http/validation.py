"""Checks shared by every dialect: body schemas, number ranges, list lengths. Each error names the field."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from inference.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Collection

T = TypeVar("T")
_AT = re.compile(r" - at `\$\.?(.*)`$")
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def convert(value: dict[str, Any], schema: type[T], strict: bool = True) -> T:
    """Convert the body to a Struct; raises InvalidRequest with the field and its expected type.

    Without `strict`, texts stand for the numbers and booleans that they write.
    """
    try:
        return msgspec.convert(value, schema, strict=strict)
    except msgspec.ValidationError as error:
        text = str(error)
        at = _AT.search(text)
        field = at.group(1) if at else None
        missing = _MISSING.search(text)
        if missing:
            field = f"{field}.{missing.group(1)}" if field else missing.group(1)
            raise InvalidRequest(f"{field}: this field is required", field) from error
        reason = _AT.sub("", text).replace(" | null", "")
        raise InvalidRequest(f"{field}: {reason}" if field else reason, field) from error


def lenient(value: dict[str, Any], schema: type[T]) -> T:
    """`convert` as vLLM's pydantic does: texts stand for numbers and booleans that they write, and 10.0 for 10."""
    return convert(value, schema, strict=False)


def check_range(field: str, value: float | None, low: float, high: float) -> None:
    """Raise InvalidRequest outside [`low`, `high`]; None is an absent value."""
    if value is not None and not low <= value <= high:
        raise InvalidRequest(f"{field} must be between {low} and {high}, got {value}.", field)


def in_range(token_ids: Collection[int], vocab_size: int) -> bool:
    """Whether all ids are in the vocabulary."""
    return not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size)


def check_count(field: str, values: list[Any] | None, limit: int) -> None:
    """Raise InvalidRequest for more than `limit` entries."""
    if values is not None and len(values) > limit:
        raise InvalidRequest(f"{field} must have at most {limit} entries, got {len(values)}.", field)
