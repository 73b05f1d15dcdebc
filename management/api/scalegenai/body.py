"""Decodes request bodies: JSON whatever the Content-Type says, with the one defect of the vendor's printed example."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from management.api.scalegenai.errors import ApiError, FieldError, InvalidFields, Location

TRAILING_BRACES = '199 - "superfluous closing braces after the JSON object were ignored"'
"""The Warning header (RFC 7234) of an answer to such a body."""
MAX_DEPTH = 32
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
"""What the registry's database cannot hold: NUL, and halves of surrogate pairs."""


def decode_object(data: bytes) -> tuple[dict[str, Any], str]:
    """The JSON object in a body, and a warning or "". Raises ApiError (400) for anything but JSON, and InvalidFields for
    another value than an object, for text that cannot be stored, and for nesting beyond MAX_DEPTH.
    """
    try:
        text = data.decode("utf-8-sig").strip()
        value, end = json.JSONDecoder(parse_constant=_no_constant).raw_decode(text)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "the body is not valid JSON") from error
    rest = text[end:]
    if rest.strip("} \t\r\n") or (rest and not isinstance(value, dict)):
        raise ApiError(400, "the body is not valid JSON")
    if not isinstance(value, dict):
        raise InvalidFields([FieldError((), "must be an object", "dict_type")])
    wrong = list(_unstorable(value, ()))
    if wrong:
        raise InvalidFields(wrong)
    return value, TRAILING_BRACES if rest else ""


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _unstorable(value: Any, location: Location) -> list[FieldError]:
    """An error for each text or number that cannot be stored, and for each place where the nesting is too deep."""
    if len(location) > MAX_DEPTH:
        return [FieldError(location, f"must be nested at most {MAX_DEPTH} deep", "recursion")]
    if isinstance(value, float) and not math.isfinite(value):  # 1e999
        return [FieldError(location, "must be a finite number", "finite_number")]
    if isinstance(value, str):
        wrong = _UNSTORABLE.search(value)
        return [FieldError(location, "must be Unicode text without NUL", "string_unicode")] if wrong else []
    if isinstance(value, dict):
        found = []
        for name, each in value.items():
            if _UNSTORABLE.search(name):
                found.append(FieldError(location, "names must be Unicode text without NUL", "string_unicode"))
            else:
                found += _unstorable(each, (*location, name))
        return found
    if isinstance(value, list):
        return [error for index, each in enumerate(value) for error in _unstorable(each, (*location, index))]
    return []
