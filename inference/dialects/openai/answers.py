"""The answers of OpenAI's routes, for the documentation: by the names that TGI's router gave them where it had them, so
that clients generated from either get the same types. They are built where they are sent, and a test compares both.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class PromptTokensDetails(msgspec.Struct):
    """Of a prompt's tokens, those that the prefix cache had."""

    cached_tokens: int


class Usage(msgspec.Struct, omit_defaults=True):
    """Numbers of tokens."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class ChatCompletionTopLogprob(msgspec.Struct):
    """A likely token; bytes from 0 to 255."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatCompletionLogprob(msgspec.Struct):
    """The log-probability of a token, and the likeliest tokens in its place."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[ChatCompletionTopLogprob]


class ChatCompletionLogprobs(msgspec.Struct):
    """Of each generated token."""

    content: list[ChatCompletionLogprob]


class FunctionCall(msgspec.Struct, omit_defaults=True):
    """The function of a tool call; the arguments are JSON, in a stream a piece of it."""

    arguments: str
    name: str | None = None


class ToolCall(msgspec.Struct):
    """A call of a function."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """A piece of the call number `index`; the first has its id and name."""

    index: int
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None


class OutputMessage(msgspec.Struct, omit_defaults=True):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = []


class ChatCompletionDelta(msgspec.Struct, omit_defaults=True):
    """What a frame adds to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] = []


Logprobs = list[dict[str, Any] | None]
"""Of each token, from its id to log-probability, rank and text; null for a prompt's first."""


class ChatCompletionComplete(msgspec.Struct, omit_defaults=True):
    """One of the answers."""

    index: int
    message: OutputMessage
    finish_reason: str | None
    logprobs: ChatCompletionLogprobs | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChoice(msgspec.Struct, omit_defaults=True):
    """A frame's part of one answer."""

    index: int
    delta: ChatCompletionDelta
    finish_reason: str | None
    logprobs: ChatCompletionLogprobs | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(msgspec.Struct, omit_defaults=True):
    """The answer to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatCompletionComplete]
    usage: Usage
    service_tier: None = None
    system_fingerprint: str | None = None
    prompt_logprobs: Logprobs | None = None
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: dict[str, Any] | None = None


class ChatCompletionChunk(msgspec.Struct, omit_defaults=True):
    """A frame of a stream; the last before [DONE] may have the usage and no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatCompletionChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(msgspec.Struct):
    """Lists with an entry for each token; `text_offset` in characters."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionComplete(msgspec.Struct, omit_defaults=True):
    """One of the texts, or a frame's part of it."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: CompletionLogprobs | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: Logprobs | None = None


class Completion(msgspec.Struct, omit_defaults=True):
    """The texts for prompts, or a frame of them."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionComplete]
    usage: Usage | None = None
    service_tier: None = None
    system_fingerprint: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


class Embedding(msgspec.Struct):
    """A vector: numbers, or base64 of their bytes."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class Embeddings(msgspec.Struct):
    """The vectors of the inputs, in their order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: Usage


class PooledVector(msgspec.Struct):
    """A vector: numbers, or base64 of their bytes."""

    index: int
    object: Literal["pooling"]
    data: list[float] | str


class Pooled(msgspec.Struct):
    """The vectors of the inputs, as vLLM's pooling models give them."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PooledVector]
    usage: Usage


class Rendered(msgspec.Struct):
    """A prompt's tokens, and the sampling parameters by vLLM's names."""

    request_id: str
    token_ids: list[int]
    features: None
    sampling_params: dict[str, Any]
    model: str | None
    stream: bool
    stream_options: dict[str, Any] | None
    cache_salt: str | None
    priority: int
    kv_transfer_params: None


class ModelInfo(msgspec.Struct):
    """A model or an adapter; `max_model_len` in tokens, `parent` the model of an adapter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None
    permission: list[dict[str, Any]]


class ModelsInfo(msgspec.Struct):
    """All that can be used."""

    object: Literal["list"]
    data: list[ModelInfo]
