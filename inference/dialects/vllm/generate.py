"""POST /generate with `prompt`, in the format of vLLM's demo server: cumulative texts with the prompt, separated by
NUL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from inference.errors import InvalidRequest, NotServed
from inference.generation.answer import Job, Reply, StreamFormat, answer, preparing
from inference.generation.requests import GenerationRequest, TextPrompt
from inference.http.exchange import json_response
from inference.http.validation import check_range, lenient
from inference.vendors import openai_errors
from inference.vendors.vllm_sampling import SamplingFields, check_sampling, sampling_overrides

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inference.errors import ServingError
    from inference.generation.deltas import Delta
    from inference.generation.generation import Generation
    from inference.http.exchange import Exchange, Headers, Response
    from inference.services import Services

DEFAULT_MAX_TOKENS = 16
HEADERS: Headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


def _render_error(error: ServingError) -> bytes:
    return msgspec.json.encode(openai_errors.body(error)[1]) + b"\0"


STREAM = StreamFormat(HEADERS, _render_error)


class DemoRequest(SamplingFields):
    """The prompt, and SamplingParams' arguments at the top level. `logprobs` does not appear in the response."""

    prompt: str = ""
    stream: bool | None = None
    model: str | None = None
    logprobs: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None


async def generate(exchange: Exchange, services: Services) -> None:
    """POST /generate with `prompt`."""
    with services.admission.permit(exchange.permit_holder):
        value = await exchange.json()
        unknown = min(value.keys() - set(DemoRequest.__struct_fields__), default=None)
        if unknown is not None:
            text = f"SamplingParams got an unexpected keyword argument {unknown[:100]!r}"
            raise InvalidRequest(text, unknown[:100])
        body = await exchange.work(lenient, value, DemoRequest)
        _check(body, services)
        target = services.router.resolve(body.model)
        request = GenerationRequest(
            model=body.model,
            prompt=TextPrompt(body.prompt),
            sampling=sampling_overrides(body, target.tokenizer),
            max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
            seed=body.engine_seed,
            n=body.n or 1,
            stop=body.stop_strings,
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            use_model_defaults=False,
        )

        def reply(generations: list[Generation]) -> DemoReply:
            return DemoReply(body.prompt, generations[0].request.n)

        stream = STREAM if body.stream else None
        await answer(exchange, Job(preparing([request], exchange, services, "vllm"), reply, stream))


def _check(body: DemoRequest, services: Services) -> None:
    if not body.prompt:
        raise InvalidRequest("prompt must be a non-empty string.", "prompt")
    for name in ("use_beam_search", "early_stopping"):
        if getattr(body, name):
            raise NotServed(f"{name} is not supported by this server.", name)
    check_sampling(body, services.limits)
    check_range("max_tokens", body.max_tokens, 1, 1 << 31)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest("best_of must equal n: this server returns every sequence that it samples.", "best_of")


class DemoReply(Reply):
    """All texts, each after its prompt."""

    def __init__(self, prompt: str, sequences: int) -> None:
        self._texts = [prompt] * sequences

    def chunks(self, delta: Delta) -> Iterable[bytes]:
        """All texts so far, and a NUL."""
        self.add(delta)
        return [msgspec.json.encode({"text": self._texts}) + b"\0"]

    def add(self, delta: Delta) -> None:
        self._texts[delta.index] += delta.text

    def whole(self) -> Response:
        return json_response({"text": self._texts})
