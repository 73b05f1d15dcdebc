"""The answers of Responses, for the documentation, by the names that OpenAI's SDK gives them. They are built where
they are sent, and a test compares both.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from inference.dialects.openai.answers import ChatCompletionLogprob


class ResponseOutputText(msgspec.Struct):
    """A text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[ChatCompletionLogprob]


class ResponseOutputMessage(msgspec.Struct, tag="message"):
    """The model's text."""

    id: str
    role: Literal["assistant"]
    status: str
    content: list[ResponseOutputText]


class ReasoningText(msgspec.Struct):
    """A text of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ResponseReasoningItem(msgspec.Struct, tag="reasoning"):
    """What the model wrote before its answer."""

    id: str
    summary: list[dict[str, Any]]
    content: list[ReasoningText]
    status: str


class ResponseFunctionToolCall(msgspec.Struct, tag="function_call", omit_defaults=True):
    """A call of a function; the arguments are JSON."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: str
    namespace: str | None = None


class ResponseCustomToolCall(msgspec.Struct, tag="custom_tool_call", omit_defaults=True):
    """A call of a tool that takes a text."""

    id: str
    call_id: str
    name: str
    input: str
    namespace: str | None = None


OutputItem = ResponseOutputMessage | ResponseReasoningItem | ResponseFunctionToolCall | ResponseCustomToolCall


class InputTokensDetails(msgspec.Struct):
    """Of a prompt's tokens, those that the prefix cache had, and the others."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(msgspec.Struct):
    """Of the output's tokens, those of the reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Numbers of tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    """Why the output is cut off."""

    reason: Literal["max_output_tokens"]


class ResponseError(msgspec.Struct):
    """Why the response failed."""

    code: str
    message: str


class Response(msgspec.Struct, omit_defaults=True):
    """A response; what the request said is repeated."""

    id: str
    created_at: int
    object: Literal["response"]
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    temperature: float
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    background: Literal[False]
    max_output_tokens: int | None
    max_tool_calls: int | None
    previous_response_id: None
    prompt: None
    prompt_cache_key: str | None
    prompt_cache_options: dict[str, Any] | None
    prompt_cache_retention: str | None
    reasoning: dict[str, Any] | None
    safety_identifier: str | None
    service_tier: str
    text: dict[str, Any]
    top_logprobs: int | None
    truncation: str
    usage: ResponseUsage | None
    user: str | None
    input_messages: list[dict[str, Any]] | None = None
    output_messages: list[dict[str, Any]] | None = None


class ResponseEvent(msgspec.Struct, omit_defaults=True):
    """An event of a stream; `type` says which of the fields it has."""

    type: str
    sequence_number: int
    response: Response | None = None
    item: dict[str, Any] | None = None
    part: dict[str, Any] | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    delta: str | None = None
    text: str | None = None
    arguments: str | None = None
    name: str | None = None
    input: str | None = None
    logprobs: list[ChatCompletionLogprob] | None = None
