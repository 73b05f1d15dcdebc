"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from inference.chat.conversation import parse_messages, template_arguments
from inference.errors import InvalidRequest, NotServed
from inference.generation.requests import ChatPrompt, Prompt, TextPrompt
from inference.http.exchange import json_response
from inference.http.offload import in_thread, in_thread_if
from inference.http.validation import in_range, lenient

if TYPE_CHECKING:
    from inference.http.exchange import Exchange
    from inference.services import Services

INLINE_IDS = 10_000
BOTH = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."


class TokenizeRequest(msgspec.Struct):
    """POST /tokenize: a `prompt`, or `messages` for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(msgspec.Struct):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


async def tokenize(exchange: Exchange, services: Services) -> None:
    """POST /tokenize: token ids, and their texts if requested."""
    with services.admission.permit(exchange.permit_holder):
        body = await exchange.work(lenient, await exchange.json(), TokenizeRequest)
        prompt = await exchange.work(_prompt, body)
        target = services.router.resolve(body.model)
        ids = await target.tokenizer.encode(prompt)
        texts = None
        if body.return_token_strs:
            texts = await in_thread(lambda: [target.tokenizer.fast.id_to_token(i) or "" for i in ids])
        answer = {"count": len(ids), "max_model_len": target.info.max_model_len, "tokens": ids, "token_strs": texts}
        await exchange.respond(await in_thread_if(len(ids) > INLINE_IDS, json_response, answer))


async def detokenize(exchange: Exchange, services: Services) -> None:
    """POST /detokenize: the text of token ids, including special tokens."""
    with services.admission.permit(exchange.permit_holder):
        body = await exchange.work(lenient, await exchange.json(), DetokenizeRequest)
        target = services.router.resolve(body.model)
        vocab_size = target.info.vocab_size
        if not await exchange.work(in_range, body.tokens, vocab_size):
            raise InvalidRequest(f"tokens: ids must be between 0 and {vocab_size - 1}.", "tokens")
        text = await in_thread(target.tokenizer.decode_long, body.tokens)
        await exchange.respond(json_response({"prompt": text}))


async def tokenizer_info(exchange: Exchange, services: Services) -> None:
    """GET /tokenizer_info: the contents of tokenizer_config.json, including the chat template."""
    target = services.router.resolve(None)
    await exchange.respond(json_response(target.tokenizer.configuration))


def _prompt(body: TokenizeRequest) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Exactly one of `prompt` and `messages` must be given.", "prompt")
    if body.chat_template is not None:
        raise NotServed("chat_template is not supported by this server.", "chat_template")
    if body.prompt is not None:
        return TextPrompt(body.prompt, body.add_special_tokens is not False)
    if body.add_generation_prompt and body.continue_final_message:
        raise InvalidRequest(BOTH, "add_generation_prompt")
    arguments = template_arguments(body.chat_template_kwargs)
    if body.tools:
        arguments["tools"] = body.tools
    continued = bool(body.continue_final_message)
    return ChatPrompt(
        parse_messages(body.messages),
        add_generation_prompt=not continued and body.add_generation_prompt is not False,
        continue_final_message=continued,
        add_special_tokens=bool(body.add_special_tokens),
        template_arguments=arguments,
    )
