"""TorchServe's errors: the gRPC status with its two lines of text, and the JSON of its REST twins."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from inference import errors
from inference.errors import ServingError
from inference.http.exchange import retry_headers
from inference.vendors.model_server import NO_METHOD, NO_ROUTE, pretty

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from inference.http.exchange import Response

ARCHIVE, HTTP = "org.pytorch.serve.archive.model.", "org.pytorch.serve.http."
INTERNAL_EXCEPTION = f"{HTTP}InternalServerException"
BAD_REQUEST = f"{HTTP}BadRequestException"
OWN_LABEL = "InternalServerException.()"
SCALE = "Please use scale workers API to add workers."
NO_WORKER = (
    "has no worker to serve inference request. " + SCALE + " If this is a sequence inference, please check if it is "
    "closed, or expired; or exceeds maxSequenceJobQueueSize"
)
TOKEN = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"
MAX_TEXT_BYTES = 2200
"""Of a status. It travels as a header of up to three times as many bytes, and clients take 8 KiB of headers."""
STATUSES = frozenset({400, 401, 403, 404, 405, 408, 409, 413, 500, 501, 503, 507})


class TorchServeError(ServingError):
    """An error with TorchServe's text.

    `code` is the gRPC status, `label` the second line of its text (empty: none), `status` and `kind` those of REST.
    """

    def __init__(self, message: str, code: str, label: str, status: int, kind: str = "") -> None:
        super().__init__(message)
        self.code, self.label, self.status = code, label, status
        self.kind = kind or label.removesuffix(".()").rpartition(".")[2] or "InternalServerException"

    @property
    def text(self) -> str:
        """The details of the gRPC status."""
        message = self.message.encode("utf-8", "replace")[:MAX_TEXT_BYTES].decode("utf-8", "ignore")
        return f"{message}\n{self.label}" if self.label else message


class TokenRefused(errors.Forbidden):
    """No valid token."""

    def __init__(self) -> None:
        super().__init__(TOKEN)


class NoWorker(errors.Unavailable):
    """The model is registered without workers."""

    def __init__(self, name: str, version: str = "") -> None:
        super().__init__(f"{_quoted(name, version)} {NO_WORKER}")


def _quoted(name: str, version: str) -> str:
    """The model in TorchServe's own quotation marks."""
    return f'Model "{name[:200]}" Version {version[:200]}"' if version else f'Model "{name[:200]}"'


@contextmanager
def naming(name: str, version: str) -> Iterator[None]:
    """Refusals of a model that is busy or has no worker name it."""
    with errors.about(_quoted(name, version) if name else ""):
        yield


def named(error: ServingError, name: str, version: str) -> ServingError:
    """The error; a refusal of a model that is busy or has no worker names it."""
    if name and isinstance(error, errors.Overloaded | errors.Unavailable):
        error.model = _quoted(name, version)
    return error


class PredictionRefused(ServingError):
    """What a TorchServe handler refuses by an HTTP status of its own: here always that nothing is there (404)."""


def bad_request(message: str, label: str = BAD_REQUEST) -> TorchServeError:
    """A parameter that cannot be used."""
    return TorchServeError(message, "INVALID_ARGUMENT", label, 400)


def not_found(message: str, exception: str = "ModelNotFoundException") -> TorchServeError:
    """A model, version or archive that is not there."""
    return TorchServeError(message, "NOT_FOUND", ARCHIVE + exception, 404)


def internal(message: str) -> TorchServeError:
    """A failure of the server's."""
    return TorchServeError(message, "INTERNAL", INTERNAL_EXCEPTION, 500)


def missing_name() -> TorchServeError:
    """A request for a prediction without a model."""
    text = "Parameter model_name is required."
    return TorchServeError(text, "INTERNAL", "BadRequestException.()", 400)


def translated(error: ServingError, strict: bool = False, managing: bool = False) -> TorchServeError:
    """Any error as TorchServe reports it. `strict`: with statuses that say what happened, where TorchServe says INTERNAL;
    `managing`: as its management service does, which always says NOT_FOUND.
    """
    if isinstance(error, TorchServeError):
        return error
    exact = strict or managing
    if isinstance(error, TokenRefused):
        return TorchServeError(error.message, "PERMISSION_DENIED", "", 400, "InvalidKeyException")
    if isinstance(error, errors.VersionNotFound):
        text = f"Model version: {error.version[:200]} does not exist for model: {error.name[:200]}"
        label = ARCHIVE + "ModelVersionNotFoundException"
        return TorchServeError(text, "NOT_FOUND" if exact else "INTERNAL", label, 404)
    if isinstance(error, errors.ModelNotFound):
        text, label = f"Model not found: {error.name[:200]}", ARCHIVE + "ModelNotFoundException"
        return TorchServeError(text, "NOT_FOUND" if exact else "INTERNAL", label, 404)
    if isinstance(error, errors.ShuttingDown):
        return TorchServeError(error.message, "UNAVAILABLE", OWN_LABEL, 503, "ServiceUnavailableException")
    if isinstance(error, errors.OverShare):
        kind = "ServiceUnavailableException"
        return TorchServeError(error.message, "RESOURCE_EXHAUSTED", OWN_LABEL, 429, kind)
    if isinstance(error, errors.Overloaded | errors.Unavailable):
        busy = "RESOURCE_EXHAUSTED" if isinstance(error, errors.Overloaded) else "UNAVAILABLE"
        text = error.message if managing or isinstance(error, NoWorker) else f"{error.model or 'Model'} {NO_WORKER}"
        return TorchServeError(text, busy if exact else "INTERNAL", OWN_LABEL, 503, "ServiceUnavailableException")
    if isinstance(error, errors.GenerationFailed):
        if error.worker_lost:
            return internal("Worker died.")
        return TorchServeError("Prediction failed", "UNAVAILABLE", INTERNAL_EXCEPTION, 503)
    if isinstance(error, errors.DeadlineExceeded):
        if exact:
            return TorchServeError(error.message, "DEADLINE_EXCEEDED", INTERNAL_EXCEPTION, 408)
        return internal("Worker died.")
    return _by_table(error, BAD_REQUEST if managing else INTERNAL_EXCEPTION)


# First match wins, so a subclass comes before its base.
_TABLE: list[tuple[type[ServingError], str, int, str]] = [
    (errors.MalformedBody, "INVALID_ARGUMENT", 400, ""),
    (errors.EncodedBody, "INVALID_ARGUMENT", 415, ""),
    (errors.InvalidRequest, "INVALID_ARGUMENT", 400, ""),
    (errors.TemplateError, "INVALID_ARGUMENT", 400, ""),
    (errors.NotServed, "UNIMPLEMENTED", 501, ""),
    (PredictionRefused, "NOT_FOUND", 404, ""),
    (errors.RouteNotFound, "UNIMPLEMENTED", 404, f"{HTTP}ResourceNotFoundException"),
    (errors.MethodNotAllowed, "UNIMPLEMENTED", 405, f"{HTTP}MethodNotAllowedException"),
    (errors.BodyTooLarge, "RESOURCE_EXHAUSTED", 413, ""),
    (errors.DuplicateRequest, "ABORTED", 409, ""),
    (errors.OtherRequest, "INVALID_ARGUMENT", 422, ""),
    (errors.Unauthorized, "UNAUTHENTICATED", 401, f"{HTTP}InvalidKeyException"),
    (errors.Forbidden, "PERMISSION_DENIED", 403, f"{HTTP}InvalidKeyException"),
    (ServingError, "INTERNAL", 500, INTERNAL_EXCEPTION),
]
_TEXTS: dict[type[ServingError], str] = {
    errors.RouteNotFound: NO_ROUTE,
    errors.MethodNotAllowed: NO_METHOD,
}


def _by_table(error: ServingError, usual: str) -> TorchServeError:
    code, status, label = next((c, s, n) for cls, c, s, n in _TABLE if isinstance(error, cls))
    text = next((text for cls, text in _TEXTS.items() if isinstance(error, cls)), error.message)
    return TorchServeError(text, code, label or usual, status)


def grpc_renderer(*, strict: bool = False, managing: bool = False) -> Callable[[ServingError], tuple[str, str]]:
    """What writes an error as a gRPC status code and its text."""

    def parts(error: ServingError) -> tuple[str, str]:
        known = translated(error, strict, managing)
        return known.code, known.text

    return parts


def _render(managing: bool, error: ServingError) -> Response:
    known = translated(error, managing=managing)
    body = {"code": known.status, "type": known.kind, "message": known.message}
    headers = [*retry_headers(error), (b"connection", b"close")]
    if isinstance(error, errors.MethodNotAllowed):
        headers.append((b"allow", ", ".join(error.allowed).encode()))
    return pretty(body, known.status, headers)


render = partial(_render, False)
"""The error as a complete response of the inference plane."""
render_managing = partial(_render, True)
"""The same of the management plane."""


def indented(value: object) -> bytes:
    """JSON as TorchServe writes it into a message."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2)
