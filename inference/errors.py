"""The errors of a request. Each dialect maps them to its own status and body."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from engine.failures import FailureCode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.adapters.failures import AdapterCode, AdapterFailure
    from engine.failures import Failure


class ServingError(Exception):
    """The base class. `message` is for the client: it never contains paths, addresses or tracebacks."""

    logged = False
    """Whether the generation's own log line already reports it."""
    reason = ""
    """The label of the refusal in the metrics; "" for errors that are no refusals."""
    should_retry: bool | None = None
    """What clients are told besides the status; None: nothing."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class MalformedBody(ServingError):
    """The body is not JSON, or not an object."""


class NotAnObject(MalformedBody):
    """The body is JSON, but a list, a text or a number."""


class EncodedBody(ServingError):
    """The body has a Content-Encoding that its route does not decode."""

    def __init__(self, encoding: str) -> None:
        super().__init__(f"Bodies with Content-Encoding {encoding[:40]!r} are not decoded here: send the body without.")


class InvalidRequest(ServingError):
    """A field is missing, of the wrong type or out of range.

    `field` is its name in the client's body; `failure` is the engine's, if the engine rejected it.
    """

    def __init__(self, message: str, field: str | None = None, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.field, self.failure = field, failure


class PromptTooLong(InvalidRequest):
    """The prompt's length in tokens exceeds the `limit`; `length` is it in words, for it may be known as a least number
    only.
    """

    def __init__(self, message: str, field: str, length: str, limit: int) -> None:
        super().__init__(message, field)
        self.length, self.limit = length, limit


class OutOfVocabulary(InvalidRequest):
    """A token id of the prompt is not in the model's vocabulary."""


class NotServed(ServingError):
    """The field or route is known but not supported. It is named, never ignored."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class TemplateError(ServingError):
    """The model has no chat template, or the template failed on these messages; `field` is the messages' name."""

    field: str | None = None


class Unauthorized(ServingError):
    """No API key, or one that is unknown, revoked or expired."""

    reason = "key"


class Forbidden(ServingError):
    """The API key is valid but lacks the scope."""

    reason = "key"


class ForeignHost(Forbidden):
    """The Host header names another server."""

    def __init__(self) -> None:
        super().__init__("This server does not answer to the name in the Host header.")


class ForeignOrigin(Forbidden):
    """A cross-site request from a page whose origin is not allowed."""

    def __init__(self) -> None:
        super().__init__("Pages of other sites may not send this request.")


class ModelNotFound(ServingError):
    """No running deployment has this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"The model `{name[:200]}` does not exist.")
        self.name = name


class VersionNotFound(ModelNotFound):
    """The served name has no such version."""

    def __init__(self, name: str, version: str) -> None:
        super().__init__(name)
        self.version = version
        self.message = f"The model `{name[:200]}` has no version {version[:200]!r}."


class ModelExists(ServingError):
    """The served name `name` has this `version` already."""

    def __init__(self, name: str, version: str) -> None:
        super().__init__(f"The model `{name[:200]}` has a version {version[:200]!r} already.")
        self.name, self.version = name, version


class SourceNotFound(ServingError):
    """None of the named sources of a model exists here, in a folder that is allowed."""


class StartFailed(ServingError):
    """The workers of a deployment cannot be started; the text is the reason."""


class ResponseNotFound(ServingError):
    """Responses are not stored, so no response has this id."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Response with id '{name[:200]}' not found.")


class AdapterNotFound(ServingError):
    """No adapter of this name, or no adapter at this path."""


class AdapterExists(ServingError):
    """An adapter of this name exists already."""


class TooManyAdapters(ServingError):
    """The limit of adapters is reached."""


class AdapterRefused(ServingError):
    """The adapter cannot be served; `failure` gives the reason if it lies in its files or with a worker."""

    def __init__(self, message: str, failure: AdapterFailure | None = None) -> None:
        super().__init__(message)
        self.failure = failure

    @property
    def code(self) -> AdapterCode | None:
        """The failure's code, if there is a failure."""
        return None if self.failure is None else self.failure.code

    @property
    def facts(self) -> dict[str, str | int | float]:
        """The facts of the code."""
        return {} if self.failure is None else self.failure.facts


class AdapterNameTaken(AdapterRefused):
    """The name is that of a deployment or model."""


class AdapterUnnameable(AdapterRefused):
    """No adapter can have the name, or the options."""


class RouteNotFound(ServingError):
    """The plane has no such path."""


class MethodNotAllowed(ServingError):
    """The path does not support the method. `allowed` lists those that it supports."""

    def __init__(self, allowed: list[str]) -> None:
        super().__init__("Method Not Allowed")
        self.allowed = allowed


class BodyTooLarge(ServingError):
    """The body exceeds the limit in bytes; it was not read."""

    reason = "size"

    def __init__(self, limit: int) -> None:
        super().__init__(f"The request body is larger than {limit} bytes.")
        self.limit = limit


class Overloaded(ServingError):
    """No permit is free, or the queue is full; the client may retry."""

    model: str = ""
    """What the client asked for, where its dialect says so."""
    retry_after_s: float = 1
    reason = "overloaded"


class ShuttingDown(Overloaded):
    """The server is draining."""

    reason = "draining"


class TooLate(Overloaded):
    """The request cannot begin before its deadline."""

    reason = "deadline"


class OverShare(Overloaded):
    """The caller has its share of a busy server; others are served."""

    reason = "share"


class RateLimited(OverShare):
    """The API key has reached its limit of requests or tokens a minute."""

    reason = "rate"


class QuotaExhausted(RateLimited):
    """The API key has used its tokens of the day."""

    reason = "quota"
    should_retry = False


class DuplicateRequest(ServingError):
    """The request was sent before under the same Idempotency-Key, and is not answered from there."""

    reason = "duplicate"


class StillRunning(DuplicateRequest):
    """The first of the equal requests has not ended."""

    retry_after_s: float = 1


class NotReplayable(DuplicateRequest):
    """The answer to the first of the equal requests is not kept."""

    should_retry = False


class OtherRequest(ServingError):
    """The Idempotency-Key was used for another request."""

    reason = "duplicate"


class Unavailable(ServingError):
    """The model's workers are loading, restarting or gone."""

    model: str = ""
    """What the client asked for, where its dialect says so."""
    retry_after_s: float = 2
    reason = "unavailable"


class Starting(Unavailable):
    """The deployment of this name has never been ready: its model is not known yet, but it is coming."""

    def __init__(self, deployment: str) -> None:
        super().__init__("The model is still loading.")
        self.deployment = deployment


class GenerationFailed(ServingError):
    """The engine failed the request after accepting it, with a `failure` of its own or because its worker is lost."""

    def __init__(self, message: str, failure: Failure | None = None, worker_lost: bool = False) -> None:
        super().__init__(message)
        self.failure, self.worker_lost = failure, worker_lost
        if failure is not None and failure.code is FailureCode.POISONOUS:
            self.should_retry, self.reason = False, "quarantine"


class InternalError(ServingError):
    """An unexpected exception; details are in the log."""


class DeadlineExceeded(ServingError):
    """The request exceeded its deadline."""


@contextmanager
def about(model: str) -> Iterator[None]:
    """What is raised here as Overloaded or Unavailable is about this model of a client's."""
    try:
        yield
    except (Overloaded, Unavailable) as error:
        error.model = model
        raise
