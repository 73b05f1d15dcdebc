"""A prediction: an input becomes a generation, whose text is the answer, whole or piece by piece."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from inference.chat.conversation import parse_messages, template_arguments
from inference.dialects.torchserve.delegated import chunks_of
from inference.dialects.torchserve.errors import PredictionRefused, indented
from inference.dialects.torchserve.inputs import Asked, Input, parse_asked, parse_input
from inference.dialects.torchserve.versions import Served, find_served, named, with_adapter
from inference.errors import MethodNotAllowed, RouteNotFound
from inference.generation.requests import ChatPrompt, GenerationRequest, TextPrompt
from inference.http.offload import INLINE_BYTES, in_thread_if
from inference.vendors.vllm_sampling import sampling_overrides
from inference.workers.scope import within

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from inference.dialects.torchserve.state import State
    from inference.generation.caller import Caller, RpcCaller
    from inference.generation.deltas import Delta
    from inference.generation.generation import Generation
    from inference.generation.requests import Prompt
    from inference.services import Limits

NAME = "torchserve"
OPENAI = "v1/"
OWN = ("url_path", "lora_adapter", "adapters")
"""Entries that OpenAI's routes do not know."""


class Prediction:
    """A generation and the form of its answer: text for text, JSON for JSON."""

    def __init__(self, generation: Generation, as_json: bool) -> None:
        self.generation, self._as_json = generation, as_json

    async def whole(self) -> bytes:
        """Generate; the complete answer."""
        text, finish = [], None
        async with aclosing(self.generation.deltas()) as deltas:
            async for delta in deltas:
                text.append(delta.text)
                finish = delta.finish_reason or finish
        said = "".join(text)
        return indented({"text": said, "finish_reason": finish}) if self._as_json else said.encode()

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Generate; the answer's pieces, one for each token that shows."""
        async with aclosing(self.generation.deltas()) as deltas:
            async for delta in deltas:
                texts = _texts(delta)
                for position, text in enumerate(texts):
                    if not self._as_json:
                        yield text.encode()
                        continue
                    finish = delta.finish_reason if position == len(texts) - 1 else None
                    yield msgspec.json.encode({"text": text, "finish_reason": finish})
                if self._as_json and not texts and delta.finish_reason is not None:
                    yield msgspec.json.encode({"text": "", "finish_reason": delta.finish_reason})


def _texts(delta: Delta) -> list[str]:
    """The delta's text by tokens; as one if stop strings hold some of it back."""
    texts = [text for text in delta.token_texts if text]
    if "".join(texts) != delta.text:
        texts = [delta.text]
    return [text for text in texts if text]


async def read_input(values: Mapping[str, bytes]) -> Input:
    """Decode the values, in a thread if they are large. Raises InvalidRequest."""
    size = sum(map(len, values.values()))
    return await in_thread_if(size > INLINE_BYTES, parse_input, values)


async def predict(state: State, given: Input, model: str, version: str, caller: Caller) -> Prediction:
    """Validate the request; nothing is sent to an engine. Raises a ServingError."""
    served = await chosen(state, given, model, version)
    asked, prompt = await in_thread_if(given.size > INLINE_BYTES, _asked, given, state.services.limits)
    body = asked.sampling
    with within(served.entry.public_id):  # its name may be that of another, default version
        target = state.services.router.resolve(served.model)
        request = GenerationRequest(
            steps=True,
            model=served.model,
            prompt=prompt,
            sampling=sampling_overrides(body, target.tokenizer),
            max_tokens=state.settings.torchserve_max_tokens if asked.max_tokens is None else asked.max_tokens,
            seed=body.engine_seed,
            stop=body.stop_strings,
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
        )
        generation = await state.services.generator.prepare(request, caller, NAME)
    return Prediction(generation, as_json=given.text is None)


def _asked(given: Input, limits: Limits) -> tuple[Asked, Prompt]:
    """What to generate, and from which prompt. Raises ServingErrors."""
    asked = parse_asked(given, limits)
    if asked.messages is None:
        return asked, TextPrompt(asked.prompt)
    arguments = template_arguments(asked.template_arguments)
    return asked, ChatPrompt(parse_messages(asked.messages), template_arguments=arguments)


async def chosen(state: State, given: Input, model: str, version: str) -> Served:
    """The deployment, with the adapter that the input names. Raises ModelNotFound, NoWorker or PredictionRefused."""
    served = await find_served(state.services, model, version)
    if (adapter := given.adapter) is not None:
        return with_adapter(served, adapter)
    return named(state.services, served, given.model)


async def openai(
    state: State, given: Input, served: Served, caller: RpcCaller, *, streams: bool
) -> AsyncGenerator[bytes, None]:
    """The chunks of OpenAI's answer, for an input with `url_path`: one chunk unless it `streams`, then a stream unless the
    body says otherwise. Raises PredictionRefused for an unknown path.
    """
    path = given.path
    if not path.startswith(OPENAI):
        raise unknown(path)
    body: dict[str, Any] | None = None
    if given.raw or "prompt" in given.fields or "messages" in given.fields:
        body = openai_body(given, served, streams)
    try:
        chunks = chunks_of(state.services, caller, f"/{path}", body, served.entry.public_id)
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk
    except (RouteNotFound, MethodNotAllowed) as error:
        raise unknown(path) from error


def openai_body(given: Input, served: Served, streams: bool) -> dict[str, Any]:
    """The body for OpenAI's route; a text is the prompt."""
    fields: dict[str, Any] = {} if given.text is None else {"prompt": given.text}
    fields.update(given.fields)
    if given.adapter is not None:
        fields["model"] = given.adapter
    fields.setdefault("model", served.name)
    if given.path.endswith("completions"):
        fields["stream"] = streams and fields.get("stream") is not False
    return {name: value for name, value in fields.items() if name not in OWN}


def unknown(path: str) -> PredictionRefused:
    """No OpenAI route has this path."""
    return PredictionRefused(f"Unknown API endpoint: {path[:200]}")
