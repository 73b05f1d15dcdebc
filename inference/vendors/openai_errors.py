"""OpenAI's error envelope with vLLM's types and statuses."""

from __future__ import annotations

from inference import errors
from inference.errors import ServingError
from inference.http.exchange import Response, json_response, retry_headers
from inference.http.sse import event

# First match wins, so a subclass comes before its base.
TABLE: list[tuple[type[ServingError], int, str]] = [
    (errors.MalformedBody, 400, "Bad Request"),
    (errors.EncodedBody, 415, "Unsupported Media Type"),
    (errors.InvalidRequest, 400, "BadRequestError"),
    (errors.TemplateError, 400, "BadRequestError"),
    (errors.NotServed, 400, "BadRequestError"),
    (errors.ModelNotFound, 404, "NotFoundError"),
    (errors.ResponseNotFound, 404, "invalid_request_error"),
    (errors.RouteNotFound, 404, "Not Found"),
    (errors.MethodNotAllowed, 405, "Method Not Allowed"),
    (errors.BodyTooLarge, 413, "Request Entity Too Large"),
    (errors.Forbidden, 403, "PermissionDeniedError"),
    (errors.NotReplayable, 409, "stream_not_replayable"),
    (errors.DuplicateRequest, 409, "ConflictError"),
    (errors.OtherRequest, 422, "UnprocessableEntityError"),
    (errors.OverShare, 429, "RateLimitError"),
    (errors.Overloaded, 503, "Service Unavailable"),
    (errors.Unavailable, 503, "ServiceUnavailableError"),
    (errors.DeadlineExceeded, 504, "GatewayTimeoutError"),
    (errors.ServingError, 500, "InternalServerError"),
]


STATUSES = frozenset(status for _, status, _ in TABLE) | {401}


def body(error: ServingError) -> tuple[int, dict[str, dict[str, object]]]:
    """Status and envelope."""
    status, kind = next((status, kind) for cls, status, kind in TABLE if isinstance(error, cls))
    param = "model" if isinstance(error, errors.ModelNotFound) else getattr(error, "field", None)
    return status, {"error": {"message": error.message, "type": kind, "param": param, "code": status}}


def render(error: ServingError) -> Response:
    """The error as a complete response."""
    if isinstance(error, errors.Unauthorized):  # vLLM sends a bare string here
        return json_response({"error": "Unauthorized"}, 401)
    return complete(error, *body(error))


def complete(error: ServingError, status: int, envelope: dict[str, dict[str, object]]) -> Response:
    """A response with this status and envelope, and the headers that the error has."""
    headers = retry_headers(error)
    if isinstance(error, errors.MethodNotAllowed):
        headers.append((b"allow", ", ".join(error.allowed).encode()))
    return json_response(envelope, status, headers)


def render_event(error: ServingError) -> bytes:
    """An error in a stream: a frame of its own, before [DONE]."""
    return event(body(error)[1])
