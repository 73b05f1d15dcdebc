"""Why a request, an adapter or a worker came to its end, as codes and facts. Words are made where they are shown.

Codes travel between processes and decide what dialects answer; no code reads a sentence.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum

import msgspec


class FinishReason(StrEnum):
    """How a sequence ended in the engine."""

    STOP = "stop"
    """An end-of-sequence token, a stop token, or a grammar that allows nothing more."""
    LENGTH = "length"
    ABORT = "abort"
    TIMEOUT = "timeout"
    ERROR = "error"


class FailureCode(StrEnum):
    """Why a request got no answer, or no whole one."""

    REQUEST_ID_IN_USE = "request_id_in_use"
    EMPTY_PROMPT = "empty_prompt"
    OUT_OF_VOCABULARY = "out_of_vocabulary"
    TOO_LONG = "too_long"
    WRONG_TASK = "wrong_task"
    OVERLOADED = "overloaded"
    DRAINING = "draining"
    ADAPTER = "adapter"
    GRAMMAR = "grammar"
    STEP_FAILED = "step_failed"
    POISONOUS = "poisonous"
    """Workers died twice while it ran."""


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """A code, and the facts that belong to it: numbers with their limits, names, a library's own reason."""

    code: FailureCode
    facts: dict[str, str | int | float] = {}


class ExitStatus(IntEnum):
    """The exit status of a worker's processes."""

    STOPPED = 0
    FAULT = 1
    """What nobody foresaw ended a rank."""
    MODEL_REFUSED = 3
    BROKEN = 4
