"""From a GenerationRequest to a Generation: resolved, tokenised, checked. Nothing is sent to an engine here.

`Generator.prepare` (1) resolves the model in the snapshot, (2) tokenises, (3) checks lengths and token ids against
the model, and fills in defaults, (4) waits for the deployment's first worker if it sleeps or starts; so every error is an
ordinary response.
"""

from __future__ import annotations

import math
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from inference.errors import InvalidRequest, OutOfVocabulary, Overloaded, PromptTooLong, TemplateError
from inference.generation.beam_search import BeamSearch, check_width
from inference.generation.generation import SEED_MASK, Generation
from inference.generation.parts import Continued, FirstToken
from inference.generation.requests import ChatPrompt, TokenPrompt, sampling_params
from inference.http.validation import in_range
from inference.workers.tokenizer import length_in_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.sampling.params import Grammar, SamplingParams
    from inference.generation.caller import Caller
    from inference.generation.generation import Observer
    from inference.generation.requests import GenerationRequest, SamplingOverrides
    from inference.workers.router import EngineRouter
    from inference.workers.target import Target


class Generator:
    """Prepares requests for the running deployments."""

    def __init__(
        self,
        router: EngineRouter,
        observers: list[Observer],
        request_timeout_s: float,
        replay_wait_s: float,
        token_timeout_s: float = 0.0,
    ) -> None:
        """`replay_wait_s`: seconds that a sequence waits for another worker after its own has ended; `token_timeout_s`: seconds
        between two tokens, 0 for any number.
        """
        self.router, self.observers = router, observers
        self.request_timeout_s, self.replay_wait_s = request_timeout_s, replay_wait_s
        self.token_timeout_s = token_timeout_s

    async def render(self, request: GenerationRequest) -> tuple[list[int], SamplingParams]:
        """The prompt's tokens and the sampling parameters, checked as for a generation; raises a ServingError."""
        return await _encode(request, self.router.resolve(request.model))

    async def prepare(self, request: GenerationRequest, caller: Caller, dialect: str) -> Generation:
        """Resolve, tokenise, check and fill in defaults; raises a ServingError and changes nothing."""
        arrived = time.monotonic()
        target = self.router.resolve(request.model)
        prompt, params = await _encode(request, target)
        timeout_s = request.longest_s or self.request_timeout_s
        patience_s = caller.standing.within(min(request.timeout_s or math.inf, timeout_s))
        # A request that would be refused wakes nobody, so this comes last.
        try:
            cold = await self.router.hold(target, caller.tenant or caller.standing.tenant.flow, patience_s)
        except Overloaded:
            for observer in self.observers:
                observer.rejected(target.entry.name)
            raise
        if cold:
            known, target = target, self.router.resolve(request.model)
            if target.tokenizer is not known.tokenizer:  # it has woken with another version of its model
                prompt, params = await _encode(request, target)
        generation = _kind(request)(
            request,
            target,
            prompt,
            params,
            caller=caller,
            dialect=dialect,
            arrived=arrived,
            router=self.router,
            observers=self.observers,
            timeout_s=timeout_s,
            replay_wait_s=self.replay_wait_s,
            encode=lambda target: _encode(request, target),
            token_timeout_s=self.token_timeout_s,
        )
        generation.cold = cold
        return generation


def _kind(request: GenerationRequest) -> type[Generation]:
    if request.beams:
        return BeamSearch
    if request.first_only:
        return FirstToken
    return Continued if request.generated else Generation


async def _encode(request: GenerationRequest, target: Target) -> tuple[list[int], SamplingParams]:
    """The prompt's tokens and the sampling parameters for this version of the model; raises a ServingError."""
    if target.info.embedding is not None:
        raise InvalidRequest(f"The model `{target.entry.name}` makes embeddings and generates no text.", "model")
    try:
        prompt = await target.tokenizer.encode(
            request.prompt, request.truncate_left, request.truncate_right, _longest_prompt(request, target)
        )
    except (InvalidRequest, TemplateError) as error:
        error.field = error.field or request.prompt_field
        raise
    if request.truncate_right is not None:
        prompt = prompt[: request.truncate_right]
    return prompt, _params(request, target, prompt)


def _params(request: GenerationRequest, target: Target, prompt: list[int]) -> SamplingParams:
    """The sampling parameters, with lengths and token ids checked against the model and defaults filled in."""
    info = target.info
    _check_prompt(request, target, prompt)
    room = info.max_model_len - len(prompt)
    overrides = _checked(request.sampling, info.vocab_size)
    max_tokens = room if request.max_tokens is None else min(request.max_tokens, room)
    if (overrides.min_tokens or 0) > max_tokens:
        raise InvalidRequest(f"min_tokens must be at most max_tokens, which is {max_tokens} here.", "min_tokens")
    grammar = None if request.grammar is None else request.grammar.grammar
    given = request.prompt
    chat = isinstance(given, ChatPrompt) or (isinstance(given, TokenPrompt) and given.chat)
    if grammar is not None and chat:
        grammar = _after_reasoning(grammar, target, prompt)
    params = sampling_params(
        overrides,
        max_tokens=max_tokens,
        seed=secrets.randbits(64) if request.seed is None else request.seed & SEED_MASK,
        grammar=grammar,
        defaults=info.sampling_defaults if request.use_model_defaults else {},
    )
    _check_some_allowed(params, info.eos_token_ids)
    if request.beams:
        check_width(request.n, params, info.eos_token_ids)
    elif params.greedy and request.n > 1:
        raise InvalidRequest(f"n must be 1 when using greedy sampling, got {request.n}.", "n")
    return params


def _check_prompt(request: GenerationRequest, target: Target, prompt: list[int]) -> None:
    info = target.info
    if not prompt:
        raise InvalidRequest("The prompt is empty: it must hold at least one token.", request.prompt_field)
    limit = _longest_prompt(request, target)
    if len(prompt) > limit:  # before the checks that look at every id
        raise PromptTooLong(
            f"This model's maximum context length is {info.max_model_len} tokens. However, your prompt contains "
            f"{length_in_words(prompt)} tokens, which leaves no room for output.",
            request.prompt_field,
            length_in_words(prompt),
            limit,
        )
    if not in_range(prompt, info.vocab_size):
        strange = next(t for t in prompt if not 0 <= t < info.vocab_size)
        raise OutOfVocabulary(
            f"Token id {strange} is out of vocabulary: ids must be between 0 and {info.vocab_size - 1}.",
            request.prompt_field,
        )


def _checked(overrides: SamplingOverrides, vocab_size: int) -> SamplingOverrides:
    """Check that the overrides' token ids are in the model's vocabulary; raises InvalidRequest."""
    if overrides.bad_words is not None:  # a tokenizer may know more tokens than the model
        overrides = replace(overrides, bad_words=[w for w in overrides.bad_words if max(w) < vocab_size])
    allowed = overrides.allowed_token_ids
    ids = {
        "logit_bias": overrides.logit_bias,
        "allowed_token_ids": allowed and [allowed[0], allowed[-1]],  # they are in order
        "stop_token_ids": overrides.stop_token_ids,
        "logprob_token_ids": overrides.logprob_token_ids,
    }
    for name, given in ids.items():
        if not in_range(given or (), vocab_size):
            raise InvalidRequest(f"{name}: token ids must be between 0 and {vocab_size - 1}.", name)
    return overrides


def _check_some_allowed(params: SamplingParams, eos_token_ids: Sequence[int]) -> None:
    """Raise InvalidRequest if `bad_words` and `min_tokens` can leave none of `allowed_token_ids`: no token could be
    chosen then. A word bans its last token where the output ends with those before it, so all that ban at one place end
    the longest of these.
    """
    allowed = set(params.allowed_token_ids or ())
    if not allowed:
        return
    words = [word for word in params.bad_words or [] if allowed.issuperset(word)]
    early = {*eos_token_ids, *params.stop_token_ids} if params.min_tokens else set[int]()

    def banned(before: list[int]) -> set[int]:
        ends = [word for word in words if len(word) <= len(before) + 1]
        return {word[-1] for word in ends if before[len(before) + 1 - len(word) :] == word[:-1]}

    for before in [[], *(word[:-1] for word in words)]:
        said = all(token not in banned(before[:position]) for position, token in enumerate(before))
        if said and allowed <= banned(before) | early:
            raise InvalidRequest("allowed_token_ids: bad_words or min_tokens leave none of them.", "allowed_token_ids")


def _longest_prompt(request: GenerationRequest, target: Target) -> int:
    """The longest prompt in tokens; one token is left for output."""
    longest = target.info.max_model_len
    return min(longest - 1, request.max_prompt_tokens or longest)


def _after_reasoning(grammar: Grammar, target: Target, prompt: list[int]) -> Grammar:
    """The grammar, applied after the reasoning part if the model has tokens for it."""
    ids = target.tokenizer.reasoning_ids(target.info.vocab_size)
    if ids is None:
        return grammar
    begun = target.tokenizer.leaves_reasoning_open(prompt)
    return msgspec.structs.replace(
        grammar, reasoning_begin=None if begun else ids[0], reasoning_end=ids[1], reasoning=begun
    )
