"""Errors as TGI's router tells them: {"error", "error_type"}, and the texts of its validation."""

from __future__ import annotations

from inference import errors
from inference.errors import ServingError
from inference.http.exchange import Response, json_response, retry_headers
from inference.http.sse import event

# First match wins, so a subclass stands before its base.
TABLE: list[tuple[type[ServingError], int, str]] = [
    (errors.MalformedBody, 400, "validation"),
    (errors.InvalidRequest, 422, "validation"),
    (errors.NotServed, 422, "validation"),
    (errors.TemplateError, 422, "template_error"),
    (errors.ModelNotFound, 404, "not_found"),
    (errors.RouteNotFound, 404, "not_found"),
    (errors.MethodNotAllowed, 405, "method_not_allowed"),
    (errors.BodyTooLarge, 413, "payload_too_large"),
    (errors.Unauthorized, 401, "unauthorized"),
    (errors.Forbidden, 403, "forbidden"),
    (errors.Overloaded, 429, "overloaded"),
    (errors.Unavailable, 503, "unavailable"),
    (errors.DeadlineExceeded, 424, "generation"),
    (errors.GenerationFailed, 424, "generation"),
    (errors.ServingError, 500, "internal"),
]
STATUSES = frozenset(status for _, status, _ in TABLE)


def body(error: ServingError) -> tuple[int, dict[str, str]]:
    """Status and JSON body."""
    status, kind = next((status, kind) for cls, status, kind in TABLE if isinstance(error, cls))
    return status, {"error": error.message, "error_type": kind}


def render(error: ServingError) -> Response:
    """A complete answer."""
    status, value = body(error)
    headers = retry_headers(error)
    if isinstance(error, errors.MethodNotAllowed):
        headers.append((b"allow", ", ".join(error.allowed).encode()))
    return json_response(value, status, headers)


def render_event(error: ServingError) -> bytes:
    """An error in a stream, whose status is 200 whatever happens."""
    return event(body(error)[1])


def invalid(text: str, field: str) -> errors.InvalidRequest:
    """A failed validation, in the router's words."""
    return errors.InvalidRequest(f"Input validation error: {text}", field)


def undeserialisable(error: errors.InvalidRequest) -> errors.InvalidRequest:
    """A body of the wrong shape, in the words of the router's JSON layer."""
    text = f"Failed to deserialize the JSON body into the target type: {error.message}"
    return errors.InvalidRequest(text, error.field)
