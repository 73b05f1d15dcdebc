"""The body of /v1/responses, and its translation to a chat request."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec

from inference.dialects.openai.responses_input import INPUT_FORMS, is_continued, messages_of
from inference.dialects.openai.responses_tools import choice_of, functions_of
from inference.dialects.openai.schema import ChatCompletionRequest
from inference.errors import InvalidRequest, NotServed, ResponseNotFound, TemplateError

NOT_SERVED = ("background", "prompt", "conversation", "previous_input_messages")
SAME = (
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output",
    "skip_special_tokens", "structured_outputs", "cache_salt", "session_id", "prompt_cache_key", "user",
    "safety_identifier", "priority", "include_reasoning", "parallel_tool_calls", "chat_template_kwargs",
)  # fmt: skip
"""Fields that mean the same in a chat request."""
CHAT_FIELDS = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
"""What a field of a chat request is called here."""
LOGPROBS = "message.output_text.logprobs"


class ResponsesRequest(msgspec.Struct):
    """POST /v1/responses. Of what these fields are about nothing is done: `store`, `metadata`, `service_tier`,
    `prompt_cache_retention`, `prompt_cache_options`, `max_tool_calls`. Responses are not stored.
    """

    input: Annotated[Any, msgspec.Meta(extra_json_schema={"anyOf": INPUT_FORMS})] = None
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    top_logprobs: int | None = None
    seed: int | None = None
    stream: bool | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    service_tier: str | None = None
    include: list[str] | None = None
    include_reasoning: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: str | None = None
    previous_response_id: str | None = None
    previous_input_messages: list[Any] | None = None
    background: bool | None = None
    prompt: dict[str, Any] | None = None
    conversation: Any = None
    enable_response_messages: bool | None = None
    request_id: str | None = None

    @property
    def shows_logprobs(self) -> bool:
        """Whether the text has log-probabilities; `top_logprobs` alone does not ask for them."""
        return LOGPROBS in (self.include or [])


def as_chat(body: ResponsesRequest) -> ChatCompletionRequest:
    """The same request for the chat route; raises InvalidRequest, NotServed, or ResponseNotFound for an earlier response,
    since none is stored.
    """
    for name in NOT_SERVED:
        if getattr(body, name):
            raise NotServed(f"{name} is not supported by this server.", name)
    if body.previous_response_id is not None:
        raise ResponseNotFound(body.previous_response_id)
    if body.truncation not in (None, "disabled", "auto"):
        raise InvalidRequest("truncation must be 'auto' or 'disabled'.", "truncation")
    messages = messages_of(body.input)
    continued = is_continued(body.input, messages)
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    effort = (body.reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise InvalidRequest("reasoning.effort must be a string.", "reasoning")
    tools = functions_of(body.tools)
    return ChatCompletionRequest(
        **{name: getattr(body, name) for name in SAME},
        messages=messages,
        continue_final_message=continued,
        max_completion_tokens=body.max_output_tokens,
        truncate_prompt_tokens=-1 if body.truncation == "auto" else None,
        logprobs=body.shows_logprobs,
        top_logprobs=body.top_logprobs if body.shows_logprobs else None,
        tools=tools,
        tool_choice=choice_of(body.tool_choice, body.tools),
        response_format=_format(body.text),
        reasoning_effort=effort,
    )


def name_field(error: InvalidRequest | NotServed | TemplateError) -> None:
    """Name the field of this route that a chat request's error means."""
    field = error.field or ""
    name = next((name for name in CHAT_FIELDS if re.match(rf"{name}\b", field)), None)
    if name is not None:
        error.field = CHAT_FIELDS[name]
        error.message = re.sub(rf"^{name}\b(\[\d+\])?", error.field, error.message)


def _format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    given = (text or {}).get("format")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise InvalidRequest("text.format must be an object.", "text")
    if given.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"name": given.get("name"), "schema": given.get("schema")}}
    return given
