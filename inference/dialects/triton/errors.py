"""Triton's errors as JSON and as gRPC statuses."""

from __future__ import annotations

from inference import errors
from inference.errors import ServingError
from inference.http.exchange import Response, json_response, retry_headers
from inference.http.sse import event


class Unsupported(errors.NotServed):
    """What Triton itself can be built or started without; its clients know the status."""


class NotFound(errors.NotServed):
    """A thing that does not exist because its extension is switched off."""


class NotUpdated(errors.NotServed):
    """A setting that can only be read."""


# First match wins, so a subclass comes before its base.
TABLE: list[tuple[type[ServingError], int, str]] = [
    (errors.MalformedBody, 400, "INVALID_ARGUMENT"),
    (errors.EncodedBody, 415, "INVALID_ARGUMENT"),
    (errors.InvalidRequest, 400, "INVALID_ARGUMENT"),
    (errors.TemplateError, 400, "INVALID_ARGUMENT"),
    (Unsupported, 501, "UNIMPLEMENTED"),
    (NotFound, 404, "NOT_FOUND"),
    (NotUpdated, 503, "UNAVAILABLE"),
    (errors.NotServed, 400, "UNIMPLEMENTED"),
    (errors.ModelNotFound, 404, "NOT_FOUND"),
    (errors.RouteNotFound, 404, "NOT_FOUND"),
    (errors.MethodNotAllowed, 405, "UNIMPLEMENTED"),
    (errors.BodyTooLarge, 413, "RESOURCE_EXHAUSTED"),
    (errors.Unauthorized, 401, "UNAUTHENTICATED"),
    (errors.Forbidden, 403, "PERMISSION_DENIED"),
    (errors.DuplicateRequest, 409, "ABORTED"),
    (errors.OtherRequest, 422, "INVALID_ARGUMENT"),
    (errors.OverShare, 429, "RESOURCE_EXHAUSTED"),
    (errors.Overloaded, 503, "UNAVAILABLE"),
    (errors.Unavailable, 503, "UNAVAILABLE"),
    (errors.DeadlineExceeded, 503, "DEADLINE_EXCEEDED"),
    (errors.ServingError, 500, "INTERNAL"),
]
STATUSES = frozenset(status for _, status, _ in TABLE)


def error_parts(error: ServingError) -> tuple[int, str, str]:
    """The HTTP status, gRPC code and message of an error."""
    status, code = next((status, code) for cls, status, code in TABLE if isinstance(error, cls))
    text = error.message
    if isinstance(error, errors.ModelNotFound):
        text = f"Request for unknown model: '{error.name[:200]}' is not found"
    return status, code, text


def grpc_parts(error: ServingError) -> tuple[str, str]:
    """The gRPC code and message of an error."""
    _, code, text = error_parts(error)
    return code, text


def render(error: ServingError) -> Response:
    """The error as a complete response."""
    status, _, text = error_parts(error)
    headers = retry_headers(error)
    if isinstance(error, errors.MethodNotAllowed):
        headers.append((b"allow", ", ".join(error.allowed).encode()))
    return json_response({"error": text}, status, headers)


def render_event(error: ServingError) -> bytes:
    """The error as a frame of a stream."""
    return event({"error": error_parts(error)[2]})
