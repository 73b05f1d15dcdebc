"""What can go wrong with a request, in words that may be shown to the client. Each dialect maps these to its own shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.adapters.failures import AdapterCode, AdapterFailure
    from engine.failures import Failure


class ServingError(Exception):
    """The root. `message` is for the client: it never carries paths, addresses or tracebacks."""

    logged = False
    """Whether a generation's own log line says how it ended."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class MalformedBody(ServingError):
    """The body is not JSON, or not an object."""


class InvalidRequest(ServingError):
    """A field is missing, of the wrong type or out of range. `field` is its name in the client's own body; `failure` is
    the engine's, where the engine found it.
    """

    def __init__(self, message: str, field: str | None = None, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.field, self.failure = field, failure


class PromptTooLong(InvalidRequest):
    """The prompt's `length` in tokens is over the `limit`."""

    def __init__(self, message: str, field: str, length: int, limit: int) -> None:
        super().__init__(message, field)
        self.length, self.limit = length, limit


class OutOfVocabulary(InvalidRequest):
    """A token id of the prompt is none of the model's."""


class NotServed(ServingError):
    """The field or route is known and this server cannot do it. It is named, never ignored."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class TemplateError(ServingError):
    """The model has no chat template, or it failed on these messages."""


class Unauthorized(ServingError):
    """No API key, or one that is unknown, revoked or expired."""


class Forbidden(ServingError):
    """The API key is good and lacks the scope."""


class ForeignHost(Forbidden):
    """The request calls the server by a name that is not its own."""

    def __init__(self) -> None:
        super().__init__("This server does not answer to the name in the Host header.")


class ForeignOrigin(Forbidden):
    """A page of another site sent the request."""

    def __init__(self) -> None:
        super().__init__("Pages of other sites may not send this request.")


class ModelNotFound(ServingError):
    """No running deployment answers to this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"The model `{name[:200]}` does not exist.")
        self.name = name


class ResponseNotFound(ServingError):
    """No response of this id is kept."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Response with id '{name[:200]}' not found.")


class AdapterNotFound(ServingError):
    """No adapter has this name, or none lies at this place."""


class AdapterExists(ServingError):
    """An adapter has this name already."""


class TooManyAdapters(ServingError):
    """There is no room for another adapter."""


class AdapterRefused(ServingError):
    """The adapter cannot be served; `failure` says why where that lies in its files or with a worker."""

    def __init__(self, message: str, failure: AdapterFailure | None = None) -> None:
        super().__init__(message)
        self.failure = failure

    @property
    def code(self) -> AdapterCode | None:
        """What is wrong, where `failure` says it."""
        return None if self.failure is None else self.failure.code

    @property
    def facts(self) -> dict[str, str | int | float]:
        """The facts that belong to the code."""
        return {} if self.failure is None else self.failure.facts


class AdapterNameTaken(AdapterRefused):
    """The name is a deployment's or a model's."""


class RouteNotFound(ServingError):
    """The plane has no such path."""


class MethodNotAllowed(ServingError):
    """The path exists and has no such method. `allowed` lists those that it has."""

    def __init__(self, allowed: list[str]) -> None:
        super().__init__("Method Not Allowed")
        self.allowed = allowed


class BodyTooLarge(ServingError):
    """The body is over the limit of so many bytes; it was not read."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"The request body is larger than {limit} bytes.")
        self.limit = limit


class Overloaded(ServingError):
    """All places are taken; trying again later may succeed."""

    retry_after_s = 1


class ShuttingDown(Overloaded):
    """The server is draining."""


class Unavailable(ServingError):
    """The model's workers are loading, restarting or gone."""

    retry_after_s = 2


class GenerationFailed(ServingError):
    """The engine gave up on the request after accepting it, by a `failure` of its own or because its worker is lost."""

    def __init__(self, message: str, failure: Failure | None = None, worker_lost: bool = False) -> None:
        super().__init__(message)
        self.failure, self.worker_lost = failure, worker_lost


class InternalError(ServingError):
    """What nobody foresaw; the log has the details."""


class DeadlineExceeded(ServingError):
    """The request ran into its deadline."""
