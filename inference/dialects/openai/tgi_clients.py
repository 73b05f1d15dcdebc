"""What chats and completions do as TGI's router where vLLM's server differs: for requests whose model is `tgi` or `dummy`.

No deployment can have these names. TGI's own clients and huggingface_hub send them, and vLLM's server knows neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inference.chat.conversation import ends_with_assistant
from inference.dialects.openai.schema import TGI_MODELS

if TYPE_CHECKING:
    from inference.dialects.openai.schema import ChatCompletionRequest, CompletionRequest


def continues(body: ChatCompletionRequest, messages: list[dict[str, Any]]) -> bool:
    """Whether a final assistant message is continued although the request does not say so."""
    silent = body.continue_final_message is None and body.add_generation_prompt is None
    return silent and body.model in TGI_MODELS and ends_with_assistant(messages)


def streams(body: ChatCompletionRequest) -> bool:
    """Whether a stream's chunks are the router's: all alike, one for each token, without a first one for the role, unless the
    request asks for what vLLM's first chunk holds.
    """
    return body.model in TGI_MODELS and not (body.echo or body.return_token_ids or body.continuous_usage)


def completes(body: CompletionRequest) -> bool:
    """Whether the chunks of a completion are the router's: one for each token, and a prompt's last one has its usage."""
    return body.model in TGI_MODELS and not body.continuous_usage


def delta(keys: dict[str, Any], calls: list[dict[str, Any]], ended: bool) -> dict[str, Any]:
    """A chunk's delta: each has the role, and in an answer with `calls` the last one has a piece of a call, too."""
    if ended and calls and not keys:
        keys = {"tool_calls": [{"index": len(calls) - 1, "function": {"arguments": ""}}]}
    if "tool_calls" in keys:
        keys = {**keys, "tool_calls": [_piece(part, calls) for part in keys["tool_calls"]]}
    return {"role": "assistant", **(keys or {"content": ""})}


def _piece(part: dict[str, Any], calls: list[dict[str, Any]]) -> dict[str, Any]:
    """A piece of a call with all its keys, which TGI's client requires of each."""
    index, function = part["index"], {"name": None, **part["function"]}
    return {"index": index, "id": calls[index]["id"], "type": "function", "function": function}
