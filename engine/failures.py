"""Failures of requests and workers as codes with facts, and the default English text of a request's failure.

Codes cross processes and decide what a dialect answers; no code parses a message.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum

import msgspec

from engine.adapters.failures import AdapterCode, AdapterFailure, Facts


class FinishReason(StrEnum):
    """How a sequence ended in the engine."""

    STOP = "stop"
    """An end-of-sequence token, a stop token, or a grammar that allows nothing more."""
    LENGTH = "length"
    ABORT = "abort"
    TIMEOUT = "timeout"
    ERROR = "error"
    MOVED = "moved"
    """The worker stops before the end of the sequence, which another worker may continue (`Submit.generated`)."""


class FailureCode(StrEnum):
    """Why a request got no answer or only part of one. The fields of a code's template are its facts."""

    REQUEST_ID_IN_USE = "request_id_in_use"
    EMPTY_PROMPT = "empty_prompt"
    EMPTY_INPUT = "empty_input"
    OUT_OF_VOCABULARY = "out_of_vocabulary"
    TOO_LONG = "too_long"
    NOTHING_LEFT = "nothing_left"
    """The tokens that the sequence has already leave none to generate."""
    TOO_LONG_FOR_CACHE = "too_long_for_cache"
    INPUT_TOO_LONG = "input_too_long"
    MAKES_NO_EMBEDDINGS = "makes_no_embeddings"
    GENERATES_NO_TEXT = "generates_no_text"
    OVERLOADED = "overloaded"
    """Fact `wait_ms`, if it is known: how long the requests before it will take to begin."""
    OVER_SHARE = "over_share"
    """Other tenants wait too, and this one has its share of the queue. Facts: as of OVERLOADED."""
    TOO_LATE = "too_late"
    """The request cannot begin before its deadline, or did not. Facts: as of OVERLOADED."""
    DRAINING = "draining"
    TAKES_NO_ADAPTERS = "takes_no_adapters"
    ADAPTER = "adapter"
    """Facts: those of the adapter's failure, and `adapter`, its AdapterCode."""
    GRAMMAR = "grammar"
    """Fact `reason`: the error text of a library or of the grammar process."""
    STEP_FAILED = "step_failed"
    POISONOUS = "poisonous"
    """The request was in flight at two worker deaths."""


TEMPLATES = {
    FailureCode.REQUEST_ID_IN_USE: "this request id is in use",
    FailureCode.EMPTY_PROMPT: "the prompt is empty",
    FailureCode.EMPTY_INPUT: "an input is empty",
    FailureCode.OUT_OF_VOCABULARY: "token ids must be between 0 and {highest}",
    FailureCode.TOO_LONG: "prompt and max_tokens need {tokens} tokens, over the limit of {limit}",
    FailureCode.NOTHING_LEFT: "there are {tokens} generated tokens, and max_tokens is {limit}",
    FailureCode.TOO_LONG_FOR_CACHE: "prompt and max_tokens need {tokens} tokens, more than the KV cache holds",
    FailureCode.INPUT_TOO_LONG: "an input has more than {limit} tokens",
    FailureCode.MAKES_NO_EMBEDDINGS: "this worker generates text and makes no embeddings",
    FailureCode.GENERATES_NO_TEXT: "this worker makes embeddings and generates no text",
    FailureCode.OVERLOADED: "overloaded",
    FailureCode.OVER_SHARE: "others wait too, and this tenant has its share of the queue",
    FailureCode.TOO_LATE: "the request cannot begin before its deadline",
    FailureCode.DRAINING: "draining",
    FailureCode.TAKES_NO_ADAPTERS: "this model's layers take no adapters",
    FailureCode.ADAPTER: "adapter: {words}",
    FailureCode.GRAMMAR: "grammar: {reason}",
    FailureCode.STEP_FAILED: "the step that computed this request failed",
    FailureCode.POISONOUS: "workers died twice while it ran; it is not tried again",
}
"""The default English of each code, with its facts by name."""


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """A code and its facts: numbers and their limits, names, a library's error text."""

    code: FailureCode
    facts: Facts = {}


def adapter_failure(failure: AdapterFailure) -> Failure:
    """The failure of a request whose adapter failed."""
    return Failure(FailureCode.ADAPTER, {**failure.facts, "adapter": str(failure.code)})


def words(failure: Failure) -> str:
    """The default English for a failure."""
    facts = failure.facts
    if failure.code is FailureCode.ADAPTER:
        facts = {"words": AdapterFailure(AdapterCode(str(facts["adapter"])), facts).words}
    return TEMPLATES[failure.code].format(**facts)


class ExitStatus(IntEnum):
    """The exit status of a worker's processes."""

    STOPPED = 0
    """Drained, or stopped by request."""
    FAULT = 1
    """An unexpected exception ended the process."""
    MODEL_REFUSED = 3
    """The model cannot be served by any worker with these options."""
    BROKEN = 4
    """The engine is broken; a restarted worker may work."""
    LEASE_EXPIRED = 5
    """No launcher renewed the worker's lease."""
