"""The body of an inference request as an object, by its Content-Type: JSON, plain text, or a form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from inference.dialects.djl.errors import PARSING, LmiError
from inference.errors import MalformedBody
from inference.http.exchange import parse_json

if TYPE_CHECKING:
    from inference.http.exchange import Exchange

MAX_FIELDS = 64
CONTENT = ("data", "body", "inputs")
"""Fields that may hold the whole request, or its text."""


async def read_body(exchange: Exchange) -> dict[str, Any]:
    """The body as LMI's handler decodes it; raises MalformedBody or LmiError."""
    kind, options = parse_options_header(exchange.header("content-type") or "application/json")
    content = await exchange.body()
    if kind == b"application/json" or kind.endswith(b"+json"):
        return await exchange.json()
    if kind == b"text/plain":
        return {"inputs": [_text(content)]}
    if kind == b"application/x-www-form-urlencoded":
        if content.lstrip().startswith(b"{"):  # what curl calls a form unless told otherwise
            return await exchange.json()
        return await exchange.work(_from_urlencoded, content)
    if kind == b"multipart/form-data":
        return await exchange.work(_from_parts, content, options.get(b"boundary", b""))
    raise LmiError(f"{PARSING}The Content-Type {kind.decode('latin-1')[:100]} is not supported.")


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise LmiError(f"{PARSING}The text is not encoded as UTF-8.") from error


def _from_urlencoded(content: bytes) -> dict[str, Any]:
    """The object that the fields of an urlencoded form make."""
    try:
        fields = dict(parse_qsl(_text(content), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS))
    except ValueError as error:
        raise LmiError(f"{PARSING}The form must have at most {MAX_FIELDS} fields, encoded as UTF-8.") from error
    return _from_fields(fields)


def _from_parts(content: bytes, boundary: bytes) -> dict[str, Any]:
    """The object that the parts of a multipart form make."""
    form = _Form()
    try:
        parser = MultipartParser(boundary, form.callbacks)
        parser.write(content)
        parser.finalize()
    except FormParserError as error:
        raise LmiError(f"{PARSING}The form is not valid multipart/form-data.") from error
    if not form.complete:
        raise LmiError(f"{PARSING}The form is not valid multipart/form-data: its end is missing.")
    return _from_fields({name: _text(value) for name, value in form.fields.items()})


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


class _Form:
    """Collects the parts of a multipart form, in memory: the body's size is limited already."""

    def __init__(self) -> None:
        self.fields: dict[str, bytes] = {}
        self.complete = False
        self._name, self._value, self._header = b"", b"", b""
        self._data: list[bytes] = []
        self.callbacks: Any = {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_part_data": self._part_data,
            "on_part_end": self._part_end,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        if len(self.fields) == MAX_FIELDS:
            raise LmiError(f"{PARSING}The form must have at most {MAX_FIELDS} fields.")
        self._name, self._data = b"", []

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._name = parse_options_header(self._value)[1].get(b"name", b"")
        self._header, self._value = b"", b""

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        self._data.append(data[start:end])

    def _part_end(self) -> None:
        name = self._name.decode("utf-8", "replace")
        if not name or name in self.fields:
            raise MalformedBody("Each part of the form needs a name of its own.")
        self.fields[name] = b"".join(self._data)

    def _end(self) -> None:
        self.complete = True
