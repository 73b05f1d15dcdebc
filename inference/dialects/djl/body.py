"""The body of an inference request as an object, by its Content-Type: JSON, plain text, or a form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from python_multipart.multipart import parse_options_header

from inference.dialects.djl.errors import PARSING, LmiError
from inference.errors import MalformedBody
from inference.http.exchange import parse_json
from inference.http.forms import MULTIPART, URLENCODED, form_fields

if TYPE_CHECKING:
    from inference.http.exchange import Exchange

MAX_FIELDS = 64
CONTENT = ("data", "body", "inputs")
"""Fields that may hold the whole request, or its text."""


async def read_body(exchange: Exchange) -> dict[str, Any]:
    """The body as LMI's handler decodes it; raises MalformedBody or LmiError."""
    content_type = exchange.header("content-type") or "application/json"
    kind, _ = parse_options_header(content_type)
    content = await exchange.body()
    if kind == b"application/json" or kind.endswith(b"+json"):
        return await exchange.json()
    if kind == b"text/plain":
        return {"inputs": [_text(content)]}
    if kind == URLENCODED and content.lstrip().startswith(b"{"):  # what curl calls a form unless told otherwise
        return await exchange.json()
    if kind in (URLENCODED, MULTIPART):
        return await exchange.work(_from_form, content_type, content)
    raise LmiError(f"{PARSING}The Content-Type {kind.decode('latin-1')[:100]} is not supported.")


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise LmiError(f"{PARSING}The text is not encoded as UTF-8.") from error


def _from_form(content_type: str, content: bytes) -> dict[str, Any]:
    """The object that the fields of a form make."""
    pairs = form_fields(content_type, content, MAX_FIELDS)
    fields = {name: _text(value) for name, value in pairs}
    if len(fields) < len(pairs):
        raise MalformedBody("Each field of the form needs a name of its own.")
    return _from_fields(fields)


def _from_fields(fields: dict[str, str]) -> dict[str, Any]:
    """The object that a form's fields make: JSON in one of CONTENT, or a text with `parameters` beside it as JSON."""
    given = next((fields[name] for name in CONTENT if name in fields), None)
    if given is None:
        raise LmiError(f"{PARSING}The form needs one of the fields {', '.join(CONTENT)}.")
    value: dict[str, Any] = parse_json(given.encode()) if given.lstrip().startswith("{") else {"inputs": given}
    if "parameters" in fields:
        value["parameters"] = parse_json(fields["parameters"].encode())
    for name in ("adapters", "model", "model_name"):
        if name in fields:
            value.setdefault(name, fields[name])
    return value
