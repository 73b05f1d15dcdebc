"""Forms as bodies, urlencoded or multipart/form-data. They are read in memory, for a body's size is limited already."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from inference.errors import MalformedBody

URLENCODED, MULTIPART = b"application/x-www-form-urlencoded", b"multipart/form-data"


def form_fields(content_type: str, body: bytes, limit: int) -> list[tuple[str, bytes]]:
    """Names and values of at most `limit` fields, in their order; a file is a field. A long form takes long, so call it with
    `Exchange.work`. Raises MalformedBody.
    """
    kind, options = parse_options_header(content_type)
    if kind == MULTIPART:
        return _Multipart(limit).read(body, options.get(b"boundary", b""))
    try:  # Latin-1 keeps the bytes, which may be no UTF-8
        pairs = parse_qsl(body.decode("latin-1"), keep_blank_values=True, encoding="latin-1", max_num_fields=limit)
    except ValueError as error:
        raise MalformedBody(f"The form must have at most {limit} fields.") from error
    return [(name.encode("latin-1").decode("utf-8", "replace"), value.encode("latin-1")) for name, value in pairs]


class _Multipart:
    """Collects the parts of a multipart form."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._fields: list[tuple[str, bytes]] = []
        self._complete = False
        self._name, self._value, self._header = b"", b"", b""
        self._data: list[bytes] = []

    def read(self, content: bytes, boundary: bytes) -> list[tuple[str, bytes]]:
        """Names and values of the parts."""
        callbacks: Any = {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_part_data": self._part_data,
            "on_part_end": self._part_end,
            "on_end": self._end,
        }
        try:
            parser = MultipartParser(boundary, callbacks)
            parser.write(content)
            parser.finalize()
        except FormParserError as error:
            raise MalformedBody("The form is not valid multipart/form-data.") from error
        if not self._complete:
            raise MalformedBody("The form is not valid multipart/form-data: its end is missing.")
        return self._fields

    def _begin(self) -> None:
        if len(self._fields) == self._limit:
            raise MalformedBody(f"The form must have at most {self._limit} fields.")
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
        if not name:
            raise MalformedBody("Each part of the form needs a name.")
        self._fields.append((name, b"".join(self._data)))

    def _end(self) -> None:
        self._complete = True
