"""MindIE's POST /v1/chat/completions, in the flavour that `openAiSupport` selects."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inference.chat.call_grammar import with_calls
from inference.chat.tools import may_call, tool_grammar
from inference.dialects.mindie.answer import counted
from inference.dialects.mindie.chat_messages import messages_of, tools_of
from inference.dialects.mindie.chat_reply import ChatReply
from inference.dialects.mindie.errors import invalid
from inference.dialects.mindie.fields import Fields
from inference.dialects.mindie.openai_parameters import Row, parse_model, parse_parameters
from inference.dialects.mindie.requests import Form, InferenceRequest, MessageType
from inference.dialects.mindie.sequences import Combination
from inference.generation.requests import ChatPrompt
from inference.http.sse import DONE

if TYPE_CHECKING:
    from inference.dialects.mindie.clocks import Clock
    from inference.dialects.mindie.settings import MindieSettings
    from inference.dialects.mindie.state import MindieState
    from inference.generation.answer import Reply
    from inference.generation.generation import Generation
    from inference.http.exchange import Exchange
    from inference.services import Services

JSON_TYPES: dict[type, str] = {int: "number", float: "number", str: "string", list: "array", dict: "object"}
"""What refusals call the types of JSON that are neither boolean nor null."""
TOP_LOGPROBS = "Parameter top logprobs must be in [0, 20], got {}."
NO_LOGPROBS = "Value error, when using top_logprobs, logprobs must be true or null in chat completions"
UNKNOWN = "Model not found"
UNKNOWN_TO_OPENAI = "Got model {name}, but not found in server"


async def create(exchange: Exchange, services: Services, state: MindieState) -> None:
    """Handle POST /v1/chat/completions."""
    with counted(exchange, services, state) as incoming:
        body = await incoming.body()
        state.check_accepting(services)
        request_id = state.new_id(exchange)
        request = await exchange.work(_parse, Fields(body), state, request_id)
        await incoming.answer(request, request_id)


def _parse(body: Fields, state: MindieState, request_id: str) -> InferenceRequest:
    vllm = state.settings.vllm_flavour
    target, model = parse_model(body, state, UNKNOWN if vllm else UNKNOWN_TO_OPENAI)
    tools, choice = tools_of(body)
    arguments = _template_arguments(body)
    messages = messages_of(body, bool(tools))
    row = Row.CHAT if vllm else Row.OPENAI_CHAT
    common = parse_parameters(body, state, target, model, _top_logprobs, Combination.check_chat, row)
    top_logprobs = common.logprobs
    forced = tool_grammar(tools, choice)
    if tools:
        arguments["tools"] = tools
    sampling = common.sampling
    if may_call(tools, choice) and target.tokenizer.tool_tag_is_special:
        sampling = replace(sampling, skip_special_tokens=False)  # otherwise the tag of a call would be lost
    form = Form(
        kind=MessageType.VLLM_OPENAI if vllm else MessageType.OPENAI,
        stream=common.stream,
        request_id=request_id,
        model=model,
        tools=tools,
        choice=choice,
        logprobs=top_logprobs,
        response_format=common.response_format,
    )
    return InferenceRequest(
        target=target,
        prompt=ChatPrompt(messages, template_arguments=arguments),
        sampling=sampling,
        max_tokens=common.max_tokens,
        form=form,
        make_reply=make_reply,
        sequences=common.sequences,
        beams=common.beams,
        logprobs=top_logprobs,
        grammar=with_calls(forced or common.grammar, tools, choice, True, target.tokenizer),
        end=DONE,
    )


def make_reply(form: Form, settings: MindieSettings, generation: Generation, clock: Clock) -> Reply:
    """The reply of this form."""
    return ChatReply(
        generation, clock, form.request_id, form.model, settings, form.tools, form.choice, form.logprobs,
        whole=not form.stream,
    )  # fmt: skip


def _top_logprobs(body: Fields) -> int | None:
    """The number of alternatives; None if no log-probabilities are requested."""
    asked, top = body.boolean("logprobs"), body.unsigned("top_logprobs", 0, 20, refusal=TOP_LOGPROBS)
    if top is not None and asked is False:
        raise invalid(NO_LOGPROBS)
    return None if not asked and top is None else top or 0


def _template_arguments(body: Fields) -> dict[str, Any]:
    """What the template is given besides messages and tools; a null `chat_template_kwargs` is no object either."""
    given = body.values.get("chat_template_kwargs", {})
    if not isinstance(given, dict):
        raise invalid("chat_template_kwargs must be a JSON object")
    thinking = given.get("enable_thinking", False)
    if not isinstance(thinking, bool):
        raise invalid(f"enable_thinking must be boolean, got {JSON_TYPES.get(type(thinking), 'null')}")
    template = body.get("chat_template")
    if template is not None and not isinstance(template, str):
        raise invalid("Parameter chat_template not string")
    if template == "":
        raise invalid("Parameter chat_template is not valid")
    if template is not None:
        raise invalid("chat_template is not supported by this endpoint")
    return {"enable_thinking": thinking} if "enable_thinking" in given else {}
