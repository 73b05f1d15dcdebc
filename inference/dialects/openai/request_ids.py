"""`request_id` of a body: the id of the answer, if the header names none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference.errors import InvalidRequest
from inference.http.exchange import REQUEST_ID_LIMIT, is_request_id

if TYPE_CHECKING:
    from inference.http.exchange import Exchange


def name_request(exchange: Exchange, request_id: str | None) -> None:
    """Give the request the id that its body names; the header `X-Request-Id` comes first, as in vLLM. Raises
    InvalidRequest.
    """
    if request_id is None:
        return
    if not is_request_id(request_id):
        text = f"request_id must have 1 to {REQUEST_ID_LIMIT} printable ASCII characters."
        raise InvalidRequest(text, "request_id")
    if exchange.header("x-request-id") != exchange.request_id:
        exchange.rename(request_id)
