"""Maps the engine's failure codes to errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.failures import FailureCode, FinishReason, words
from inference.errors import (
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    OverShare,
    ServingError,
    ShuttingDown,
    TooLate,
    Unavailable,
)
from inference.generation.ending import EndCause

if TYPE_CHECKING:
    from engine.failures import Failure
    from engine.messages import RequestOutput
    from inference.generation.requests import GrammarRequest

MAX_LOGGED = 300
"""Logged characters of a failure's text."""


def failure_of(
    output: RequestOutput, grammar: GrammarRequest | None, *, cancelled: bool = False
) -> ServingError | None:
    """The error that an output carries, or None.

    `grammar` is the request's grammar; a request that was `cancelled` expects to be aborted.
    """
    if output.finish_reason == FinishReason.TIMEOUT:
        return DeadlineExceeded("The request ran into its deadline.")
    if output.finish_reason == FinishReason.ABORT:
        return None if cancelled else GenerationFailed("Request failed during generation: None")
    if output.finish_reason != FinishReason.ERROR:
        return None
    failure = output.error
    if failure is None:
        return GenerationFailed("Request failed during generation: None")
    if failure.code == FailureCode.GRAMMAR:
        field = "grammar" if grammar is None else grammar.field
        return InvalidRequest(f"{field}: {failure.facts['reason']}", field, failure)
    if (error := refused(failure)) is not None:
        return error
    return GenerationFailed(f"Request failed during generation: {words(failure)}", failure)


def refused(failure: Failure) -> Overloaded | None:
    """The error of a request that the engine did not begin because others wait before it; None for other failures."""
    error: Overloaded
    if failure.code is FailureCode.OVERLOADED:
        error = Overloaded("Model is overloaded")
    elif failure.code is FailureCode.OVER_SHARE:
        error = OverShare("Other callers wait too, and this one has its share of the queue.")
    elif failure.code is FailureCode.TOO_LATE:
        error = TooLate("The request cannot begin before its deadline.")
    else:
        return None
    error.retry_after_s = float(failure.facts.get("wait_ms", 0)) / 1e3
    return error


def log_failure(error: ServingError) -> tuple[EndCause, tuple[str, str] | None]:
    """The cause for the log of a generation that ended with this error, and the failure's code and text for it."""
    failure = getattr(error, "failure", None)
    if failure is not None:
        # A grammar's text may quote the grammar, which is the client's own.
        text = "" if failure.code is FailureCode.GRAMMAR else words(failure)[:MAX_LOGGED]
        return EndCause.FAILED, (failure.code.value, text)
    if isinstance(error, DeadlineExceeded | TooLate):
        return EndCause.DEADLINE, None
    if isinstance(error, ShuttingDown):
        return EndCause.SHUTDOWN, None
    if isinstance(error, GenerationFailed) and error.worker_lost:
        return EndCause.WORKER_LOST, None
    if isinstance(error, Unavailable):
        return EndCause.WORKER_LOST, None
    return EndCause.FAILED, (type(error).__name__, error.message)
