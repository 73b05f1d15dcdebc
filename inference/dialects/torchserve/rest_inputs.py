"""The named values of a REST prediction: the query, and the body as a form, as JSON, or as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from inference.dialects.torchserve.inputs import MAX_VALUES
from inference.errors import InvalidRequest
from inference.http.forms import MULTIPART, URLENCODED, form_fields

if TYPE_CHECKING:
    from inference.http.exchange import Exchange


def query_of(exchange: Exchange) -> dict[str, str]:
    """The query's parameters; of several with a name the last counts. Raises InvalidRequest."""
    try:
        return dict(parse_qsl(exchange.query, keep_blank_values=True, max_num_fields=MAX_VALUES))
    except ValueError as error:
        raise InvalidRequest(f"the query must have at most {MAX_VALUES} parameters") from error


async def values_of(exchange: Exchange) -> dict[str, bytes]:
    """The values by name; a body that is no form is named `body`. Raises InvalidRequest or MalformedBody."""
    values = {name: value.encode() for name, value in query_of(exchange).items()}
    body = await exchange.body()
    kind = (exchange.header("content-type") or "").partition(";")[0].strip().lower()
    if kind.encode() in (URLENCODED, MULTIPART):
        return {**values, **await exchange.work(_form, exchange.header("content-type") or "", body)}
    if body:
        values["body"] = body
    return values


def _form(content_type: str, body: bytes) -> dict[str, bytes]:
    """The fields and files of a form, by name; of several with a name the last counts."""
    return dict(form_fields(content_type, body, MAX_VALUES))
