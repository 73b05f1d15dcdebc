"""The router's error bodies {"error", "error_type"}, and the texts of its validation."""

from __future__ import annotations

from engine.failures import FailureCode
from inference import errors
from inference.errors import ServingError
from inference.http.exchange import Response, json_response, retry_headers
from inference.http.sse import event
from inference.vendors.tgi_grammar import invalid_grammar

# First match wins, so a subclass comes before its base.
TABLE: list[tuple[type[ServingError], int, str]] = [
    (errors.NotAnObject, 422, "validation"),
    (errors.MalformedBody, 400, "validation"),
    (errors.EncodedBody, 415, "validation"),
    (errors.InvalidRequest, 422, "validation"),
    (errors.NotServed, 422, "validation"),
    (errors.TemplateError, 422, "template_error"),
    (errors.ModelNotFound, 404, "not_found"),
    (errors.RouteNotFound, 404, "not_found"),
    (errors.MethodNotAllowed, 405, "method_not_allowed"),
    (errors.BodyTooLarge, 413, "payload_too_large"),
    (errors.Unauthorized, 401, "unauthorized"),
    (errors.Forbidden, 403, "forbidden"),
    (errors.DuplicateRequest, 409, "conflict"),
    (errors.OtherRequest, 422, "validation"),
    (errors.Overloaded, 429, "overloaded"),
    (errors.Unavailable, 503, "unavailable"),
    (errors.DeadlineExceeded, 424, "generation"),
    (errors.GenerationFailed, 424, "generation"),
    (errors.ServingError, 500, "internal"),
]
NOT_JSON = "Failed to parse the request body as JSON"
WRONG_TYPE = "Failed to deserialize the JSON body into the target type"
STATUSES = frozenset(status for _, status, _ in TABLE)


def body(error: ServingError) -> tuple[int, dict[str, str]]:
    """Status and JSON body."""
    status, kind = next((status, kind) for cls, status, kind in TABLE if isinstance(error, cls))
    return status, {"error": _text(error), "error_type": kind}


def _text(error: ServingError) -> str:
    """The error's text: what is no JSON, or JSON of another type, is refused by the router's parser, and a grammar that could
    not be compiled is named as one that the router refuses.
    """
    if isinstance(error, errors.NotAnObject):
        return f"{WRONG_TYPE}: {error.message}"
    if isinstance(error, errors.MalformedBody):
        return f"{NOT_JSON}: {error.message}"
    failure = error.failure if isinstance(error, errors.InvalidRequest) else None
    if failure is None or failure.code != FailureCode.GRAMMAR:
        return error.message
    return invalid(invalid_grammar(str(failure.facts["reason"]), "grammar").message, "grammar").message


def render(error: ServingError) -> Response:
    """The error as a complete response."""
    status, value = body(error)
    headers = retry_headers(error)
    if isinstance(error, errors.MethodNotAllowed):
        headers.append((b"allow", ", ".join(error.allowed).encode()))
    return json_response(value, status, headers)


def render_event(error: ServingError) -> bytes:
    """An error frame of a stream (the status is always 200)."""
    return event(body(error)[1])


def invalid(text: str, field: str) -> errors.InvalidRequest:
    """A validation error, with the router's text."""
    return errors.InvalidRequest(f"Input validation error: {text}", field)


def undeserialisable(error: errors.InvalidRequest) -> errors.InvalidRequest:
    """A body of the wrong shape, with the error text of the router's JSON parser."""
    return errors.InvalidRequest(f"{WRONG_TYPE}: {error.message}", error.field)
