"""MindIE's error body {"error", "error_type"} and the status of each error."""

from __future__ import annotations

from inference import errors
from inference.dialects.mindie.settings import MEBIBYTE
from inference.errors import ServingError
from inference.http.exchange import Response, json_response, retry_headers

TYPES = {
    400: "Bad Request",
    404: "NotFoundError",
    409: "Conflict",
    422: "Input Validation Error",
    424: "Generation Error",
    429: "Too Many Requests",
    500: "Incomplete Generation",
    503: "Service Unavailable",
}
REASONS = {413: b"Payload Too Large", 422: b"Unprocessable Content"}
"""The phrases of the vendor's server that are not those of RFC 7231 and its like."""
ENQUEUE = "Failed to enqueue inferRequest. "
STOPPED = "The service has been stopped"


class MindieError(ServingError):
    """An error with MindIE's text."""

    def __init__(self, status: int, message: str, error_type: str | None = None) -> None:
        super().__init__(message)
        self.status, self.error_type = status, error_type or TYPES[status]


class CallbackTimeout(errors.DeadlineExceeded):
    """A timer expired; `which` is "client timeout", "server tokenTimeout" or "server e2eTimeout"."""

    def __init__(self, which: str) -> None:
        super().__init__(f"Engine callback timeout: {which}")


def invalid(message: str) -> MindieError:
    """A 422 error."""
    return MindieError(422, message)


def model_not_found(name: str) -> MindieError:
    """The 404 error of endpoints with a model in the path."""
    return MindieError(404, f"Model {name[:256]} not found.")


def translated(error: ServingError) -> MindieError:
    """Map any error to a MindieError."""
    if isinstance(error, MindieError):
        return error
    if isinstance(error, errors.PromptTooLong):
        limit, length = error.limit, error.length
        text = f"This model's maximum input ids length cannot be greater than {limit},the input ids length is {length}"
        return MindieError(424, ENQUEUE + text)
    if isinstance(error, errors.OutOfVocabulary):
        return MindieError(424, ENQUEUE + "Invalid Input Ids")
    if isinstance(error, errors.MalformedBody | errors.EncodedBody):
        return invalid("Failed to parse request context to json")
    if isinstance(error, errors.InvalidRequest | errors.NotServed | errors.TemplateError | errors.ModelNotFound):
        return invalid(error.message)
    if isinstance(error, errors.ShuttingDown):
        return MindieError(503, STOPPED)
    if isinstance(error, errors.OverShare):
        return MindieError(429, error.message)
    if isinstance(error, errors.DuplicateRequest):
        return MindieError(409, error.message)
    if isinstance(error, errors.OtherRequest):
        return invalid(error.message)
    if isinstance(error, errors.Overloaded):
        return MindieError(503, "Too many requests")
    if isinstance(error, errors.Unavailable):
        return MindieError(500, ENQUEUE + "No available LlmManager.")
    if isinstance(error, CallbackTimeout):
        return MindieError(500, error.message)
    if isinstance(error, errors.DeadlineExceeded):
        return MindieError(500, "Engine callback timeout: server e2eTimeout")
    if isinstance(error, errors.Unauthorized):
        return MindieError(401, error.message, "Unauthorized")
    if isinstance(error, errors.Forbidden):
        return MindieError(403, error.message, "Forbidden")
    return MindieError(500, "Failed to get engine response.")


def render(error: ServingError) -> Response:
    """The error as a complete response, with the vendor's status line."""
    response = _response(error)
    response.reason = REASONS.get(response.status, b"")
    return response


def _response(error: ServingError) -> Response:
    if isinstance(error, errors.RouteNotFound | errors.MethodNotAllowed):
        return Response(404, b"", b"")
    if isinstance(error, errors.InternalError):
        return Response(500, b"Server internal error")
    if isinstance(error, errors.BodyTooLarge):
        limit_mb = error.limit // MEBIBYTE
        return json_response({"message": f"Request body too large. Maximum allowed size is {limit_mb}MB."}, 413)
    mapped = translated(error)
    body = {"error": mapped.message, "error_type": mapped.error_type}
    return json_response(body, mapped.status, retry_headers(error))


def render_late(error: ServingError) -> bytes:
    """Render an error inside a stream: plain text, then the end."""
    if isinstance(error, errors.DeadlineExceeded | errors.ShuttingDown):
        return translated(error).message.encode()
    return b"Failed to get engine response"
