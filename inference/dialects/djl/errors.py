"""DJL Serving's two error bodies: the server's {"code", "type", "message"}, and LMI's {"error", "code"}."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference import errors
from inference.errors import ServingError
from inference.http.exchange import json_response, retry_headers
from inference.vendors.model_server import NO_METHOD, NO_ROUTE, pretty

if TYPE_CHECKING:
    from inference.http.exchange import Response

PARSING = "Input Parsing failed. Ensure that the request payload is valid. "
DEPENDENCY = 424
OUT_OF_RESOURCES = 507


class DjlError(ServingError):
    """An error of the server, with its status and the simple name of Java's exception."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


class LmiError(ServingError):
    """An error of LMI's handler, with its status."""

    def __init__(self, message: str, status: int = DEPENDENCY) -> None:
        super().__init__(message)
        self.status = status


def bad_request(message: str, status: int = 400) -> DjlError:
    """BadRequestException, which may have any status."""
    return DjlError(status, "BadRequestException", message)


def conflict(message: str) -> DjlError:
    """IllegalArgumentException, 409."""
    return DjlError(409, "IllegalArgumentException", message)


def not_found(message: str) -> DjlError:
    """ModelNotFoundException, 404."""
    return DjlError(404, "ModelNotFoundException", message)


def not_ready(message: str) -> DjlError:
    """ServiceUnavailableException, 503."""
    return DjlError(503, "ServiceUnavailableException", message)


# First match wins, so a subclass comes before its base.
TABLE: list[tuple[type[ServingError], int, str]] = [
    (errors.MalformedBody, 400, "BadRequestException"),
    (errors.EncodedBody, 415, "BadRequestException"),
    (errors.InvalidRequest, 400, "BadRequestException"),
    (errors.NotServed, 400, "BadRequestException"),
    (errors.TemplateError, 400, "BadRequestException"),
    (errors.ModelExists, 409, "IllegalArgumentException"),
    (errors.SourceNotFound, 404, "ModelNotFoundException"),
    (errors.StartFailed, 500, "EngineException"),
    (errors.ModelNotFound, 404, "ModelNotFoundException"),
    (errors.RouteNotFound, 404, "ResourceNotFoundException"),
    (errors.MethodNotAllowed, 405, "MethodNotAllowedException"),
    (errors.BodyTooLarge, 413, "TooLongFrameException"),
    (errors.Unauthorized, 401, "UnauthorizedException"),
    (errors.Forbidden, 403, "ForbiddenException"),
    (errors.DuplicateRequest, 409, "IllegalArgumentException"),
    (errors.OtherRequest, 422, "BadRequestException"),
    (errors.OverShare, 429, "WlmCapacityException"),
    (errors.Overloaded, 503, "WlmCapacityException"),
    (errors.Unavailable, 503, "ServiceUnavailableException"),
    (errors.DeadlineExceeded, 503, "WlmException"),
    (errors.ServingError, 500, "InternalServerException"),
]
STATUSES = frozenset(status for _, status, _ in TABLE) | {DEPENDENCY, OUT_OF_RESOURCES}
TEXTS: dict[type[ServingError], str] = {errors.RouteNotFound: NO_ROUTE, errors.MethodNotAllowed: NO_METHOD}


def render(error: ServingError) -> Response:
    """The server's error body."""
    if isinstance(error, DjlError):
        status, kind = error.status, error.kind
    else:
        status, kind = next((status, kind) for cls, status, kind in TABLE if isinstance(error, cls))
    response = pretty({"code": status, "type": kind, "message": TEXTS.get(type(error), error.message)}, status)
    response.headers = retry_headers(error)
    if isinstance(error, errors.MethodNotAllowed):
        response.headers.append((b"allow", ", ".join(error.allowed).encode()))
    return response


def render_inference(error: ServingError) -> Response:
    """The error body of an inference route: LMI's for what its handler refuses or fails at, else the server's."""
    status = lmi_status(error)
    if status is None:
        return render(error)
    if isinstance(error, errors.GenerationFailed | errors.DeadlineExceeded):
        details = {"finish_reason": "error"}
        return json_response(
            {"generated_text": None, "error": error.message, "code": status, "details": details},
            status,
            retry_headers(error),
        )
    text = f"{PARSING}{error.message}" if isinstance(error, errors.MalformedBody) else error.message
    return json_response({"error": text, "code": status}, status)


def lmi_status(error: ServingError) -> int | None:
    """The status of an error of LMI's handler; None for an error of the server itself."""
    if isinstance(error, LmiError):
        return error.status
    if isinstance(error, errors.MalformedBody | errors.GenerationFailed | errors.DeadlineExceeded):
        return DEPENDENCY
    if isinstance(error, errors.InvalidRequest | errors.NotServed | errors.TemplateError):
        return 400
    return 404 if isinstance(error, errors.ModelNotFound) else None
