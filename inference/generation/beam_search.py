"""Beam search on top of the engine: each step is a request per beam that goes on with its tokens by one.

As in vLLM: each beam is extended by its best 2 x width tokens, the `width` likeliest continue, and beams that end in
an end token are set aside; the best are returned, by likelihood over their number of tokens, an end token included. The
model's own sampling defaults have no part in it. Beams share their common prefix through the prefix cache. The result is
only known after the last step, so every sequence is one delta at the end. A step whose worker dies is repeated at another
one.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field
from heapq import nlargest
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from engine.failures import FinishReason
from engine.sampling.params import SamplingParams
from inference.errors import GenerationFailed, InvalidRequest
from inference.generation.deltas import Delta
from inference.generation.ending import EndCause
from inference.generation.generation import Generation
from inference.generation.placement import Interrupted
from inference.generation.text import IncrementalDecoder
from inference.workers.target import Superseded

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from engine.messages import TokenLogprob
    from inference.generation.placement import Placement
    from inference.generation.requests import GenerationRequest
    from inference.workers.routing.assignment import Assignment

MAX_WIDTH = 64
HISTORY = (
    "stop", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "bad_words", "grammar",
    "prompt_logprobs", "stop_token_ids", "logprob_token_ids",
)  # fmt: skip
"""Parameters that depend on the history, which cannot be applied step by step."""
NEUTRAL = SamplingParams(max_tokens=1)


def check_beams(request: GenerationRequest) -> None:
    """Check the parameters of a beam search; raises InvalidRequest with the field."""
    if request.n > MAX_WIDTH:
        raise InvalidRequest(f"n must be at most {MAX_WIDTH} with use_beam_search, got {request.n}.", "n")
    given = {"stop": request.stop, "grammar": request.grammar, **request.sampling.given}
    for name in HISTORY:
        value = given.get(name)
        if value not in (None, [], getattr(NEUTRAL, name, None)):
            raise InvalidRequest(f"{name} cannot be used with use_beam_search.", name)


def check_width(width: int, params: SamplingParams, eos_token_ids: Sequence[int]) -> None:
    """Check that the allowed tokens make as many sequences as are wanted; raises InvalidRequest."""
    allowed = set(params.allowed_token_ids or ())
    if not allowed:
        return
    ends = 0 if params.ignore_eos else len(allowed.intersection(eos_token_ids))
    going_on, ended = 1, 0
    for _ in range(params.max_tokens):
        ended += going_on * ends
        going_on *= len(allowed) - ends
        if not going_on or ended + going_on >= width:
            break
    if ended + going_on < width:
        text = f"n must be at most {ended + going_on} with these allowed_token_ids and max_tokens, got {width}."
        raise InvalidRequest(text, "n")


@dataclass(slots=True)
class _Beam:
    """One candidate continuation of the prompt."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    likelihood: float = 0.0
    ended: bool = False

    def score(self, length_penalty: float) -> float:
        return self.likelihood / max(1, len(self.token_ids)) ** length_penalty


class _Extension(NamedTuple):
    """A beam and one of its likeliest next tokens. Few of a step's extensions become beams: a beam copies its lists."""

    beam: _Beam
    step: TokenLogprob
    """The step's output, with its likeliest tokens in `top`."""
    rank: int
    """Of the token in `top`, from 1."""
    token_id: int
    likelihood: float
    """Of the beam with this token."""

    def extended(self, ended: bool) -> _Beam:
        """The beam with the token."""
        beam, (_, logprob) = self.beam, self.step.top[self.rank - 1]
        token = msgspec.structs.replace(self.step, token_id=self.token_id, logprob=logprob, rank=self.rank)
        return _Beam([*beam.token_ids, self.token_id], [*beam.logprobs, token], self.likelihood, ended)


class BeamSearch(Generation):
    """A request with `beams`: its n sequences are the n best beams, best first."""

    async def _merged(self) -> AsyncGenerator[Delta, None]:
        width = self.request.n
        params = msgspec.structs.replace(
            NEUTRAL,
            temperature=0.0,
            logit_bias=self.params.logit_bias,
            allowed_token_ids=self.params.allowed_token_ids,
            ignore_eos=True,
            logprobs=2 * width,
            logprobs_mode="processed",
        )
        beams, placement = [_Beam()], self._placement()
        ended: list[_Beam] = []
        for _ in range(self.params.max_tokens):
            steps = await self._steps(beams, params, placement)
            if self.cancelled:
                break  # with the beams as they were
            self._submitted.clear()
            found = [extension for extensions in steps for extension in extensions]
            eos = () if self.params.ignore_eos else self.target.info.eos_token_ids
            ended = self._best([*ended, *(e.extended(ended=True) for e in found if e.token_id in eos)])
            likeliest = nlargest(width, (e for e in found if e.token_id not in eos), key=attrgetter("likelihood"))
            beams = [extension.extended(ended=False) for extension in likeliest]
            if not beams:
                break
        for index, beam in enumerate(self._best([*ended, *beams])):
            yield self._delta(index, beam)

    def _best(self, beams: list[_Beam]) -> list[_Beam]:
        """The n beams that would be the answer, best first."""
        return nlargest(self.request.n, beams, key=lambda beam: beam.score(self.request.length_penalty))

    async def _steps(self, beams: list[_Beam], params: SamplingParams, placement: Placement) -> list[list[_Extension]]:
        """Extend all beams concurrently; the first failure cancels the others."""
        tasks = [asyncio.ensure_future(self._step(beam, params, placement)) for beam in beams]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _step(self, beam: _Beam, params: SamplingParams, placement: Placement) -> list[_Extension]:
        """The beam's extensions by its likeliest tokens; none if the request was cancelled."""
        interrupted: Interrupted | None = None
        while True:
            demand = self._demand.longer([*self.prompt_token_ids, *beam.token_ids], 1)
            try:
                assignment = await placement.worker(interrupted, demand, begun=bool(beam.token_ids))
                if assignment is None:
                    return []
                return await self._extensions(assignment, beam, params)
            except Interrupted as error:
                interrupted = error
            except Superseded as error:  # the first step: there is one beam, without tokens
                await self._encode_for(error.target)
                placement.follow(self.target)
                interrupted = None

    async def _extensions(self, assignment: Assignment, beam: _Beam, params: SamplingParams) -> list[_Extension]:
        # A sequence that has begun is not refused for what waits meanwhile.
        params = msgspec.structs.replace(params, max_tokens=len(beam.token_ids) + 1)
        async with aclosing(self._outputs(assignment, self.prompt_token_ids, params, beam.token_ids)) as outputs:
            async for output in outputs:
                self.note(0 if not beam.token_ids else 1, output)
                if output.logprobs:
                    step = output.logprobs[0]
                    return [
                        _Extension(beam, step, rank, token_id, beam.likelihood + logprob)
                        for rank, (token_id, logprob) in enumerate(step.top, 1)
                    ]
        if self.cancelled:
            return []
        raise GenerationFailed("The generation ended early.")

    def _delta(self, index: int, beam: _Beam) -> Delta:
        tokenizer = self.target.tokenizer
        skip = self.request.skip_special_tokens and not self.request.token_texts
        decoder = IncrementalDecoder(
            tokenizer.fast, self.prompt_token_ids, tokenizer.special_ids if skip else frozenset()
        )
        shown = beam.token_ids[:-1] if beam.ended else beam.token_ids
        texts = [decoder.step(token) for token in shown]
        asked = self.params.logprobs
        logprobs = None
        if asked is not None:
            logprobs = [msgspec.structs.replace(token, top=token.top[:asked]) for token in beam.logprobs]
        return Delta(
            index,
            "".join(texts),
            beam.token_ids,
            logprobs=logprobs,
            token_texts=[*texts, ""] if beam.ended else texts,
            finish_reason=FinishReason.STOP if beam.ended or self.cancelled else FinishReason.LENGTH,
            ended_by_eos=beam.ended,
            cause=EndCause.END_OF_SEQUENCE if beam.ended else self._cancelled or EndCause.LENGTH,
            prompt=self.request.number,
        )
