"""MindIE's POST /v1/completions: vLLM's ranges, one prompt as a text or as one list of token ids."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from inference.dialects.mindie.answer import counted
from inference.dialects.mindie.errors import invalid
from inference.dialects.mindie.fields import Fields
from inference.dialects.mindie.openai_parameters import Row, parse_model, parse_parameters, usage
from inference.dialects.mindie.parameters import TextErrors, text_of
from inference.dialects.mindie.requests import Form, InferenceRequest, MessageType
from inference.dialects.mindie.sequences import Combination
from inference.generation.answer import Reply
from inference.generation.requests import Prompt, TextPrompt, TokenPrompt
from inference.http.exchange import Response, json_response
from inference.http.sse import DONE, event
from inference.vendors.openai_logprobs import Context, LogprobTexts, floor

if TYPE_CHECKING:
    from engine.messages import TokenLogprob
    from inference.dialects.mindie.clocks import Clock
    from inference.dialects.mindie.settings import MindieSettings
    from inference.dialects.mindie.state import MindieState
    from inference.generation.deltas import Delta
    from inference.generation.generation import Generation
    from inference.http.exchange import Exchange
    from inference.services import Services

UNKNOWN = "Not found given model, please check modelName in config file."
NO_PROMPT = "Contains not prompt or prompt null"
STRANGE = "The type of prompt is abnormal,prompt must be str or integer list."
LENGTH = "Length of Prompt {kind} should be greater than 0 and less than or equal to {limit}, but got {length}"
WRONG = TextErrors(NO_PROMPT, "", STRANGE, LENGTH.replace("{kind}", "text"))
MAX_TOKENS = 1 << 20


async def create(exchange: Exchange, services: Services, state: MindieState) -> None:
    """Handle POST /v1/completions."""
    with counted(exchange, services, state) as incoming:
        body = await incoming.body()
        state.check_accepting(services)
        request_id = state.new_id(exchange)
        request = await exchange.work(_parse, Fields(body), state, request_id)
        await incoming.answer(request, request_id)


def _parse(body: Fields, state: MindieState, request_id: str) -> InferenceRequest:
    target, model = parse_model(body, state, UNKNOWN)
    prompt = _prompt(body.get("prompt"), state.settings)
    common = parse_parameters(body, state, target, model, _logprobs, Combination.check_completions, Row.COMPLETIONS)
    form = Form(
        kind=MessageType.VLLM_OPENAI_COMP,
        stream=common.stream,
        request_id=request_id,
        model=model,
        logprobs=common.logprobs,
        returned=common.returned,
        response_format=common.response_format,
    )
    return InferenceRequest(
        target=target,
        prompt=prompt,
        sampling=common.sampling,
        max_tokens=common.max_tokens,
        form=form,
        make_reply=make_reply,
        sequences=common.sequences,
        beams=common.beams,
        logprobs=common.logprobs,
        grammar=common.grammar,
        end=DONE,
    )


def make_reply(form: Form, settings: MindieSettings, generation: Generation, clock: Clock) -> Reply:
    """The reply of this form."""
    return CompletionReply(generation, clock, form.request_id, form.model, settings, form.logprobs, form.returned)


def _prompt(given: Any, settings: MindieSettings) -> Prompt:
    if given is None:
        raise invalid(NO_PROMPT)
    if isinstance(given, str):
        return TextPrompt(text_of(given, settings, WRONG))
    if not isinstance(given, list):
        raise invalid(STRANGE)
    if not given:
        raise invalid("Prompt array cannot be empty.")
    if not set(map(type, given)) <= {int}:
        raise invalid("All elements of the prompt array must be integers.")
    if len(given) > MAX_TOKENS:
        raise invalid(LENGTH.format(kind="token", limit=MAX_TOKENS, length=len(given)))
    return TokenPrompt(given)


def _logprobs(body: Fields) -> int | None:
    return body.unsigned("logprobs", 0, 5, refusal="logprobs should be in range [0, 5], got {}.")


class CompletionChoice:
    """The state of one sequence."""

    def __init__(self, prompt_token_ids: list[int]) -> None:
        self.context = Context(prompt_token_ids)
        self.text = ""
        self.entries: list[TokenLogprob] = []
        self.unsent: list[TokenLogprob] = []
        self.tokens = 0
        self.finish: str | None = None
        self.stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        """Add a delta."""
        self.text += delta.text
        self.entries += delta.logprobs or []
        self.tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.finish, self.stop_reason = delta.finish_reason, delta.stop_reason

    @property
    def cumulative_logprob(self) -> float:
        """Choices are sorted by it."""
        return sum(token.logprob for token in self.entries)


class CompletionReply(Reply):
    """All sequences of a prompt."""

    def __init__(
        self,
        generation: Generation,
        clock: Clock,
        request_id: str,
        model: str,
        settings: MindieSettings,
        logprobs: int | None,
        returned: int,
    ) -> None:
        self._generation, self._clock, self._settings = generation, clock, settings
        self._id, self._model, self._logprobs, self._returned = request_id, model, logprobs, returned
        self._texts = LogprobTexts(generation.target.tokenizer, as_ids=False)
        self._choices = [CompletionChoice(generation.prompt_token_ids) for _ in range(generation.request.n)]
        self._offset = 0

    def chunks(self, delta: Delta) -> list[bytes]:
        """A chunk of one choice; its last chunk has `usage`, after `choices`."""
        choice = self._choices[delta.index]
        choice.add(delta)
        if self._generation.request.beams and len(self._choices) > 1:  # one frame with the whole response
            return [b"data: " + self.whole().body + b"\n\n"] if all(c.finish for c in self._choices) else []
        ended = delta.finish_reason is not None
        choice.unsent += delta.logprobs or []
        if not delta.text and not ended:
            return []
        entries, choice.unsent = choice.unsent, []
        text = choice.text if self._settings.full_text_enabled else delta.text
        chunk = self._head()
        chunk["choices"] = [self._render_choice(delta.index, text, entries, choice)]
        if ended:
            chunk["usage"] = usage(
                self._generation, choice.tokens, self._clock, self._settings.benchmark_enabled
            )  # fmt: skip
        return [event(chunk)]

    def add(self, delta: Delta) -> None:
        self._choices[delta.index].add(delta)

    def whole(self) -> Response:
        """The complete response, the likeliest choice first."""
        order = self._choices
        if len(order) > 1:
            order = sorted(order, key=lambda choice: choice.cumulative_logprob, reverse=True)[: self._returned]
        value = self._head()
        value["choices"] = [
            self._render_choice(i, choice.text, choice.entries, choice) for i, choice in enumerate(order)
        ]
        tokens = sum(choice.tokens for choice in order)
        value["usage"] = usage(self._generation, tokens, self._clock, self._settings.benchmark_enabled)
        return json_response(value)

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": int(time.time()), "model": self._model}

    def _render_choice(
        self, index: int, text: str, entries: list[TokenLogprob], choice: CompletionChoice
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": None if self._logprobs is None else self._lists(entries, choice.context),
            "stop_reason": choice.stop_reason,
            "finish_reason": choice.finish,
        }

    def _lists(self, entries: list[TokenLogprob], context: Context) -> dict[str, list[Any]]:
        """The `logprobs` lists. `text_offset` counts UTF-8 bytes and continues across choices, as in MindIE."""
        lists: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for entry in entries:
            text = self._texts.text(entry.token_id, context)
            top = {text: floor(entry.logprob)}
            for token_id, value in entry.top[: self._logprobs]:
                top.setdefault(self._texts.text(token_id, context), floor(value))
            context.add(entry.token_id)
            lists["text_offset"].append(self._offset)
            lists["token_logprobs"].append(floor(entry.logprob))
            lists["tokens"].append(text)
            lists["top_logprobs"].append(top)
            self._offset += len(text.encode())
        return lists
