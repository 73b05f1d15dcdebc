"""MindIE's POST /v1/chat/completions, in the flavour that `openAiSupport` selects."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inference.chat.conversation import parse_messages
from inference.chat.tools import check_tools, may_call, tool_grammar
from inference.dialects.mindie.answer import InferenceRequest, answer, body_of, counted
from inference.dialects.mindie.chat_reply import ChatReply
from inference.dialects.mindie.errors import invalid
from inference.dialects.mindie.fields import INT32_MAX, Fields
from inference.dialects.mindie.openai_parameters import parse_model, parse_parameters
from inference.dialects.mindie.parameters import part_text
from inference.dialects.mindie.sequences import Combination
from inference.generation.requests import ChatPrompt
from inference.http.sse import DONE

if TYPE_CHECKING:
    from inference.dialects.mindie.state import MindieState
    from inference.http.exchange import Exchange
    from inference.services import Services

TOOL_NAME = re.compile(r"[a-zA-Z0-9_\u4e00-\u9fa5-]{1,64}")
TOOL_ROLES = ("system", "assistant", "user", "tool")
TOP_LOGPROBS = "Parameter top logprobs must be in [0, 20], got {}."
NO_LOGPROBS = "Value error, when using top_logprobs, logprobs must be true or null in chat completions"
BUDGET = f"Parameter thinking_budget must be in [1,{INT32_MAX}], got {{}}"
UNKNOWN = "Model not found"
UNKNOWN_TO_OPENAI = "Got model {name}, but not found in server"


async def create(exchange: Exchange, services: Services, state: MindieState) -> None:
    """Handle POST /v1/chat/completions."""
    with counted(exchange, services, state):
        body = await body_of(exchange, state)
        state.check_accepting(services)
        request_id = state.new_id(exchange)
        request = await exchange.work(_parse, Fields(body), state, request_id)
        await answer(exchange, services, state, request, request_id)


def _parse(body: Fields, state: MindieState, request_id: str) -> InferenceRequest:
    vllm = state.settings.vllm_flavour
    target, model = parse_model(body, state, UNKNOWN if vllm else UNKNOWN_TO_OPENAI)
    tools, choice = _tools(body)
    messages = _messages(body.get("messages"), bool(tools))
    common = parse_parameters(body, state, target, model, _top_logprobs, Combination.check_chat, vllm)
    top_logprobs = common.logprobs
    forced = tool_grammar(tools, choice)
    arguments = _template_arguments(body, vllm)
    if tools:
        arguments["tools"] = tools
    sampling = common.sampling
    if may_call(tools, choice) and target.tokenizer.tool_tag_is_special:
        sampling = replace(sampling, skip_special_tokens=False)  # otherwise the tag of a call would be lost
    return InferenceRequest(
        target=target,
        prompt=ChatPrompt(messages, template_arguments=arguments),
        sampling=sampling,
        max_tokens=common.max_tokens,
        reply=lambda generation, clock: ChatReply(
            generation, clock, request_id, model, state.settings, tools, choice, top_logprobs, whole=not common.stream
        ),
        stream=common.stream,
        sequences=common.sequences,
        beams=common.beams,
        logprobs=top_logprobs,
        grammar=forced or common.grammar,
        end=DONE,
    )


def _messages(given: Any, with_tools: bool) -> list[dict[str, Any]]:
    """Messages by MindIE's rules; the texts of a list of parts are joined without a separator."""
    if given is None:
        raise invalid("Request param contains not messages or messages null")
    if not given or not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
        raise invalid("Request param messages not arr or arr is empty")
    return parse_messages([_message(message, with_tools) for message in given])


def _message(message: dict[str, Any], with_tools: bool) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise invalid("Request param contains not role or role null")
    if with_tools and role not in TOOL_ROLES:
        raise invalid("Request param contains role must be system, assistant, user or tool")
    if role == "tool":
        _check_call_id(message.get("tool_call_id"))
    calls = role == "assistant" and bool(message.get("tool_calls"))
    if content is None and calls:
        return message
    if content is None:
        raise invalid("Request param contains not content or content null")
    if isinstance(content, list):
        if not content:
            raise invalid("Inputs arr is empty")
        content = "".join(map(part_text, content))
    if not isinstance(content, str):
        raise invalid("The type of inputs is abnormal")
    if role == "assistant" and not content and not calls:
        raise invalid('Request param "content" should not be empty')
    return {**message, "content": content}


def _check_call_id(given: Any) -> None:
    if given is None:
        raise invalid("Request param contains not tool_call_id or tool_call_id null while role is tool")
    if not isinstance(given, str):
        raise invalid("The type of tool_call_id is abnormal")
    if not given:
        raise invalid("Request param tool_call_id len should not be 0 while role is tool")


def _tools(body: Fields) -> tuple[list[dict[str, Any]] | None, str | dict[str, Any] | None]:
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)):
        raise invalid("tools must be array type.")
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise invalid("Parameter tool_choice string not in [none, auto, required]")
    if choice is not None and not isinstance(choice, str | dict):
        raise invalid("tool_choice must be string or object type.")
    if not tools:
        return None, None
    check_tools(tools, choice)
    for tool in tools:
        if not TOOL_NAME.fullmatch(tool["function"]["name"]):
            raise invalid(f"The format of the function name is invalid, it should match ^{TOOL_NAME.pattern}$.")
    return tools, choice


def _top_logprobs(body: Fields) -> int | None:
    """The number of alternatives; None if no log-probabilities are requested."""
    asked, top = body.boolean("logprobs"), body.unsigned("top_logprobs", 0, 20, refusal=TOP_LOGPROBS)
    if top is not None and asked is False:
        raise invalid(NO_LOGPROBS)
    return None if not asked and top is None else top or 0


def _template_arguments(body: Fields, vllm: bool) -> dict[str, Any]:
    if body.string("chat_template"):
        raise invalid("chat_template is not supported by this endpoint")
    given = body.object("chat_template_kwargs")
    thinking = given.boolean("enable_thinking")
    budget = given.integer("thinking_budget", 1, refusal=BUDGET) if vllm else None
    if thinking and budget is not None:
        raise invalid("thinking_budget is not supported by this endpoint")
    return {} if thinking is None else {"enable_thinking": thinking}
