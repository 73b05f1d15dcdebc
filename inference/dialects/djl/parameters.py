"""The parameters of a management call: from the query, and from a JSON body where the query lacks them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from inference.dialects.djl.errors import DjlError, bad_request
from inference.http.exchange import parse_json

if TYPE_CHECKING:
    from inference.http.exchange import Exchange

MAX_PARAMETERS = 64
MAX_CHARACTERS = 4096
"""The longest value of a parameter."""
PAGE = 100
INT_MAX = (1 << 31) - 1
_INTEGER = re.compile(r"[+-]?[0-9]{1,10}")


class Parameters:
    """Parameters by name. As in DJL Serving, an empty value is a missing one, and of several values the first counts."""

    def __init__(self, query: dict[str, list[str]], body: dict[str, str]) -> None:
        self._query, self._body = query, body

    def text(self, name: str) -> str | None:
        """The value, or None."""
        return self._query.get(name, [""])[0] or self._body.get(name) or None

    def required(self, name: str) -> str:
        """The value; raises BadRequestException without one."""
        value = self.text(name)
        if value is None:
            raise bad_request(f"The parameter {name} is required")
        return value

    def flag(self, name: str) -> bool | None:
        """True or false in any case, None without a value."""
        value = self.text(name)
        if value is None:
            return None
        if value.lower() not in ("true", "false"):
            raise bad_request(f"The parameter {name} must be true or false")
        return value.lower() == "true"

    def integer(self, name: str, default: int) -> int:
        """An integer of 32 bits; raises NumberFormatException."""
        text = self.text(name)
        if text is None:
            return default
        value = as_integer(text)
        if value is None:
            raise DjlError(409, "NumberFormatException", f'For input string: "{text[:100]}"')
        return value

    def page(self, size: int) -> tuple[int, int]:
        """First and end of the page of a list of `size` entries, by `limit` and `next_page_token`."""
        limit, first = self.integer("limit", PAGE), self.integer("next_page_token", 0)
        first = max(first, 0)
        return first, min(first + (limit if 0 <= limit <= PAGE else PAGE), size)

    def singles(self) -> dict[str, str]:
        """The parameters that have one value."""
        return {**self._body, **{name: values[0] for name, values in self._query.items() if len(values) == 1}}


def as_integer(text: str) -> int | None:
    """An integer of 32 bits; None for other texts."""
    value = int(text) if _INTEGER.fullmatch(text) else INT_MAX + 1
    return value if -INT_MAX - 1 <= value <= INT_MAX else None


async def read_parameters(exchange: Exchange) -> Parameters:
    """The parameters of a call; raises BadRequestException for what cannot be parameters.

    A body that says that it is JSON, or begins like an object, is read; others are ignored, as in DJL Serving.
    """
    query = query_of(exchange)
    if exchange.method != "POST":
        return Parameters(query, {})
    body = await exchange.body()
    if not body.strip() or not ("json" in (exchange.header("content-type") or "") or body.lstrip().startswith(b"{")):
        return Parameters(query, {})
    return Parameters(query, _texts(await exchange.work(parse_json, body)))


def query_of(exchange: Exchange) -> dict[str, list[str]]:
    """The values of each query parameter."""
    try:
        query = parse_qs(exchange.query, keep_blank_values=True, errors="strict", max_num_fields=MAX_PARAMETERS)
    except ValueError as error:  # UnicodeDecodeError too
        raise bad_request(
            f"The query must have at most {MAX_PARAMETERS} parameters, encoded as UTF-8 and percent signs."
        ) from error
    for name, values in query.items():
        _check(name, *values)
    return query


def _texts(body: dict[str, Any]) -> dict[str, str]:
    """The entries of a body as parameters; null is a missing one."""
    texts = {}
    if len(body) > MAX_PARAMETERS:
        raise bad_request(f"The body must have at most {MAX_PARAMETERS} parameters")
    for name, value in body.items():
        if isinstance(value, dict | list):
            raise bad_request(f"The parameter {name[:100]} must be a text, a number or a boolean")
        text = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        _check(name, text)
        texts[name] = text
    return texts


def _check(name: str, *values: str) -> None:
    for text in (name, *values):
        if len(text) > MAX_CHARACTERS:
            raise bad_request(f"The parameter {name[:100]} is longer than {MAX_CHARACTERS} characters")
        if "\0" in text:  # which no registry need hold: PostgreSQL cannot
            raise bad_request("A parameter must have no NUL.")
