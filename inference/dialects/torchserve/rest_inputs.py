"""The named values of a REST prediction: the query, and the body as a form, as JSON, or as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

import python_multipart
from python_multipart.exceptions import FormParserError

from inference.dialects.torchserve.inputs import MAX_VALUES
from inference.errors import InvalidRequest

if TYPE_CHECKING:
    from inference.http.exchange import Exchange

FORM, MULTIPART = "application/x-www-form-urlencoded", "multipart/form-data"


def query_of(exchange: Exchange) -> dict[str, str]:
    """The query's parameters; of several with a name the last counts. Raises InvalidRequest."""
    text = exchange.scope.get("query_string", b"").decode("latin-1")
    try:
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_VALUES))
    except ValueError as error:
        raise InvalidRequest(f"the query must have at most {MAX_VALUES} parameters") from error


async def values_of(exchange: Exchange) -> dict[str, bytes]:
    """The values by name; a body that is no form is named `body`. Raises InvalidRequest."""
    values = {name: value.encode() for name, value in query_of(exchange).items()}
    body = await exchange.body()
    kind = (exchange.header("content-type") or "").partition(";")[0].strip().lower()
    if kind in (FORM, MULTIPART):
        return {**values, **await exchange.work(_form, exchange.header("content-type") or "", body)}
    if body:
        values["body"] = body
    return values


def _form(content_type: str, body: bytes) -> dict[str, bytes]:
    """The fields and files of a form, by name."""
    found: dict[str, bytes] = {}

    def on_field(field: python_multipart.multipart.Field) -> None:
        found[(field.field_name or b"").decode("utf-8", "replace")] = field.value or b""
        if len(found) > MAX_VALUES:
            raise InvalidRequest(f"the form must have at most {MAX_VALUES} fields")

    def on_file(file: python_multipart.multipart.File) -> None:
        file.file_object.seek(0)
        found[(file.field_name or b"").decode("utf-8", "replace")] = file.file_object.read()
        file.close()
        if len(found) > MAX_VALUES:
            raise InvalidRequest(f"the form must have at most {MAX_VALUES} fields")

    try:
        parser = python_multipart.create_form_parser(
            {"Content-Type": content_type.encode("latin-1")},
            on_field,
            on_file,
            config={"MAX_MEMORY_FILE_SIZE": 1 << 62},  # the body is in memory, and limited; nothing is written to disk
        )
        parser.write(body)
        parser.finalize()
    except (FormParserError, ValueError) as error:
        raise InvalidRequest("the body is no valid form") from error
    return found
