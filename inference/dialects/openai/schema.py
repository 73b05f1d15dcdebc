"""The request bodies of /v1/completions and /v1/chat/completions, and their translation for the engine.

A field that is known but not supported is refused by name; unknown fields are ignored, as OpenAI's and vLLM's servers
do. `null` is an absent value.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from inference.chat.tools import MODES
from inference.dialects.openai import kv_transfer
from inference.dialects.openai.kv_transfer import KvTransferParams
from inference.dialects.openai.prompts import PROMPT_FORMS
from inference.dialects.openai.structured import grammar_of
from inference.errors import InvalidRequest, NotServed
from inference.generation.beam_search import check_beams
from inference.generation.requests import GenerationRequest, GrammarRequest, Prompt, SamplingOverrides
from inference.http.validation import check_range
from inference.vendors.vllm_sampling import SamplingFields, check_sampling, sampling_overrides

if TYPE_CHECKING:
    from inference.services import Limits
    from inference.workers.tokenizer import ModelTokenizer

MAX_SESSION_CHARACTERS = 256
MOST_PRIORITY = (1 << 31) - 1
URLS = ("http://", "https://")
TGI_MODELS = ("tgi", "dummy")


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonRequest(SamplingFields):
    """The fields that both routes share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    echo: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    logprob_token_ids: list[int] | None = None
    request_id: str | None = None
    kv_transfer_params: KvTransferParams | None = None

    def __post_init__(self) -> None:
        """huggingface.js names the server's URL as the model, which no deployment can be called: it is one of TGI's clients."""
        if self.model is not None and self.model.startswith(URLS):
            self.model = "tgi"

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk includes the usage so far."""
        return bool(self.include_usage and self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(CommonRequest):
    """POST /v1/completions."""

    prompt: Annotated[Any, msgspec.Meta(extra_json_schema={"anyOf": PROMPT_FORMS})] = None
    prompt_embeds: Any = None
    suffix: str | None = None
    logprobs: int | None = None
    best_of: int | None = None

    @property
    def sequences(self) -> int:
        """The number of sequences to generate for each prompt."""
        return self.best_of or self.n or 1

    @property
    def echoes_logprobs(self) -> bool:
        """Whether the choices' `logprobs` begin with the prompt's."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def shows_prompt_logprobs(self) -> bool:
        """Whether choices of a whole response have `prompt_logprobs`."""
        return self.prompt_logprobs is not None or self.echoes_logprobs


class ChatFields(CommonRequest):
    """The fields of a chat besides its messages."""

    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """TGI's clients may send an empty list of tools and a mode of choice without tools, which the router ignores."""
        super().__post_init__()
        if self.model in TGI_MODELS and not self.tools:
            self.tools = None
            self.tool_choice = None if self.tool_choice in MODES else self.tool_choice


class ChatCompletionRequest(ChatFields):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] | None = None


class BatchChatCompletionRequest(ChatFields):
    """POST /v1/chat/completions/batch: one answer to each conversation."""

    messages: list[list[dict[str, Any]]] | None = None


NOT_SERVED = (
    "prompt_embeds", "suffix", "functions",
    "function_call", "chat_template", "audio",
)  # fmt: skip


def check(body: CommonRequest, limits: Limits) -> GrammarRequest | None:
    """Checks that need no model; raises InvalidRequest or NotServed.

    Returns the grammar of the body.
    """
    for name in NOT_SERVED:
        if getattr(body, name, None) not in (None, False, ""):
            raise NotServed(f"{name} is not supported by this server.", name)
    check_sampling(body, limits)
    if (
        body.truncate_prompt_tokens is not None
        and body.truncate_prompt_tokens != -1
        and body.truncate_prompt_tokens < 1
    ):
        raise InvalidRequest("truncate_prompt_tokens must be -1 or at least 1.", "truncate_prompt_tokens")
    if body.truncation_side not in (None, "left", "right"):
        raise InvalidRequest("truncation_side must be 'left' or 'right'.", "truncation_side")
    if body.logprob_token_ids is not None and not 1 <= len(body.logprob_token_ids) <= 128:
        raise InvalidRequest("logprob_token_ids must have 1 to 128 entries.", "logprob_token_ids")
    if body.stream_options not in (None, StreamOptions()) and not body.stream:
        raise InvalidRequest("Stream options can only be defined when `stream=True`.", "stream_options")
    if body.stream and body.prompt_logprobs:
        raise InvalidRequest("prompt_logprobs are not available when `stream=True`.", "prompt_logprobs")
    if body.cache_salt is not None and not 0 < len(body.cache_salt) <= 128:
        raise InvalidRequest("cache_salt must have 1 to 128 characters.", "cache_salt")
    check_range("length_penalty", body.length_penalty, -10, 10)
    check_range("priority", body.priority, -MOST_PRIORITY, MOST_PRIORITY)
    return grammar_of(body)


def sampling(body: CommonRequest, logprobs: int | None, tokenizer: ModelTokenizer) -> SamplingOverrides:
    """The sampling parameters that the body sets."""
    overrides = sampling_overrides(body, tokenizer)
    return replace(overrides, logprobs=logprobs, logprob_token_ids=body.logprob_token_ids)


def generation_request(
    body: CommonRequest,
    prompt: Prompt,
    overrides: SamplingOverrides,
    max_model_len: int,
    *,
    max_tokens: int | None,
    grammar: GrammarRequest | None,
    sequences: int | None = None,
    skip_special_tokens: bool = True,
    number: int = 0,
    session: str | None = None,
    prompt_field: str = "prompt",
) -> GenerationRequest:
    """The GenerationRequest of one prompt of this body; `number` is the prompt's index. `session` is the header's.

    `sequences` None means `n`; without `skip_special_tokens`, special tokens are included whatever the body says.
    """
    keep = body.truncate_prompt_tokens
    if keep is not None and keep > max_model_len:
        text = f"truncate_prompt_tokens must be at most {max_model_len}, the model's context, got {keep}."
        raise InvalidRequest(text, "truncate_prompt_tokens")
    if keep == -1:
        keep = max_model_len - 1
    right = body.truncation_side == "right"
    request = GenerationRequest(
        model=body.model,
        prompt=prompt,
        sampling=overrides,
        grammar=grammar,
        max_tokens=max_tokens,
        seed=body.engine_seed,
        n=sequences or body.n or 1,
        stop=body.stop_strings,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=skip_special_tokens and body.skip_special_tokens is not False,
        truncate_left=None if right else keep,
        truncate_right=keep if right else None,
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        session=(body.session_id or session or body.prompt_cache_key or body.user or "")[:MAX_SESSION_CHARACTERS],
        end_user=body.safety_identifier or body.user or "",
        beams=bool(body.use_beam_search),
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        number=number,
        prompt_field=prompt_field,
        hold=kv_transfer.holds(body.kv_transfer_params, max_tokens),
        blocks=kv_transfer.blocks(body.kv_transfer_params),
    )
    if request.beams:
        check_beams(request)
    return request
