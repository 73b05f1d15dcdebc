"""The responses of the router by its own names, for the documentation. They are built where they are sent, and a test
compares both.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class FinishReason(StrEnum):
    """Why a sequence ended."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"


class Token(msgspec.Struct):
    """A generated token."""

    id: int
    text: str
    logprob: float | None
    special: bool


class PrefillToken(msgspec.Struct):
    """A token of the prompt; the first has no log-probability."""

    id: int
    text: str
    logprob: float | None


class BestOfSequence(msgspec.Struct, omit_defaults=True):
    """One of the sequences that `best_of` did not choose."""

    generated_text: str
    finish_reason: FinishReason
    generated_tokens: int
    prefill: list[PrefillToken]
    tokens: list[Token]
    seed: int | None = None
    top_tokens: list[list[Token]] = []


class Details(msgspec.Struct, omit_defaults=True):
    """`details` of a whole response; the seed is null for greedy decoding."""

    finish_reason: FinishReason
    generated_tokens: int
    prefill: list[PrefillToken]
    tokens: list[Token]
    seed: int | None = None
    best_of_sequences: list[BestOfSequence] | None = None
    top_tokens: list[list[Token]] = []


class GenerateResponse(msgspec.Struct, omit_defaults=True):
    """POST /generate, and each element of the list of POST /."""

    generated_text: str
    details: Details | None = None


class StreamDetails(msgspec.Struct):
    """`details` of a stream's last frame."""

    finish_reason: FinishReason
    generated_tokens: int
    input_length: int
    seed: int | None = None


class StreamResponse(msgspec.Struct, omit_defaults=True):
    """One frame of a stream; the last one has the whole text."""

    index: int
    token: Token
    top_tokens: list[Token] = []
    generated_text: str | None = None
    details: StreamDetails | None = None


class SimpleToken(msgspec.Struct):
    """A token of POST /tokenize, with the bytes of `inputs` that it stands for."""

    id: int
    text: str
    start: int
    stop: int


class ChatTokenizeResponse(msgspec.Struct):
    """POST /chat_tokenize."""

    tokenize_response: list[SimpleToken]
    templated_text: str


class VertexResponse(msgspec.Struct):
    """POST /vertex."""

    predictions: list[str]


class Info(msgspec.Struct):
    """GET /info: the fields of all router versions."""

    model_id: str
    model_dtype: str
    model_device_type: str
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_length: int
    max_input_tokens: int
    max_total_tokens: int
    max_batch_total_tokens: int
    max_batch_size: int
    validation_workers: int
    max_client_batch_size: int
    router: str
    version: str
    model_sha: str | None = None
    model_pipeline_tag: str | None = None
    sha: str | None = None
    docker_label: str | None = None


class ErrorResponse(msgspec.Struct):
    """Every error, in a stream as a frame."""

    error: str
    error_type: str
