"""Runs the computation of one step: tensors in, tokens and log-probabilities out. It does not schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from engine.batch import Chosen, build_batch
from engine.sampling.logprobs import Asked, token_logprobs

if TYPE_CHECKING:
    from engine.backend import Backend
    from engine.messages import TokenLogprob
    from engine.models.loader import LoadedModel
    from engine.request import Request
    from engine.sampling.sampler import ChosenTokens
    from engine.scheduled_batch import ScheduledBatch

LOGPROB_ROWS = 32
"""Rows of logits that are made into log-probabilities at a time: that takes several times their memory."""


@dataclass(slots=True)
class StepResult:
    """The results of a step by request: one token, and one more for each accepted draft token."""

    tokens: dict[Request, list[int]] = field(default_factory=dict)
    logprobs: dict[Request, list[TokenLogprob]] = field(default_factory=dict)
    prompt_logprobs: dict[Request, list[TokenLogprob]] = field(default_factory=dict)


@dataclass(slots=True)
class LaunchedStep:
    """A step that the device still computes; it samples one token for each of `requests`."""

    requests: list[Request]
    chosen: ChosenTokens

    def result(self) -> StepResult:
        """Wait for the device and read the tokens."""
        tokens = self.chosen.read()
        return StepResult({request: [token] for request, token in zip(self.requests, tokens, strict=True)})


class ModelRunner:
    """Runs scheduled batches through the model, the KV cache and the sampler."""

    def __init__(self, backend: Backend, loaded: LoadedModel, cache: Any) -> None:
        """`cache` is a KV cache of this backend (`Backend.new_cache`)."""
        self.backend, self.forward, self.cache = backend, loaded.forward, cache
        self.sampler = backend.sampler(loaded.eos_token_ids)
        self._chosen: Chosen | None = None
        """The unread tokens of the previous step, if it was returned unfinished."""

    @torch.inference_mode()
    def launch(self, scheduled: ScheduledBatch) -> StepResult | LaunchedStep:
        """Run one forward pass and sample a token for every request that reached the end of its tokens, if any did. If the
        device samples and no request asks for more than tokens, the step is returned unfinished.
        """
        batch = build_batch(scheduled, self.cache.block_size, self._chosen)
        self._chosen = None
        logits = self.backend.run(self.forward, self.cache, batch)
        if not batch.drafts and not batch.prompt_rows:
            # A device computes a row also where none is wanted.
            chosen = self.sampler.choose_later(batch.sampled, logits[: len(batch.sampled)])
            if chosen is not None:
                requests = [request for request, _ in batch.sampled]
                self._chosen = Chosen(chosen.tokens, {request: row for row, request in enumerate(requests)})
                return LaunchedStep(requests, chosen)
        result = StepResult()
        if batch.sampled:
            tokens, logprobs = self.sampler.sample(batch.sampled, logits[: len(batch.sampled)])
            for (request, number), token, logprob in zip(batch.sampled, tokens, logprobs, strict=True):
                sampled = result.tokens.setdefault(request, [])
                if sampled[:number] != batch.drafts.get(request, [])[:number]:
                    continue  # it was computed after a rejected draft token
                sampled.append(token)
                if logprob is not None:
                    result.logprobs.setdefault(request, []).append(logprob)
        row = len(batch.sampled)
        for request, first, count in batch.prompt_rows:
            following = request.token_ids[first + 1 : first + count + 1]
            found = result.prompt_logprobs[request] = []
            for begin in range(0, count, LOGPROB_ROWS):
                tokens = following[begin : begin + LOGPROB_ROWS]
                some = logits[row + begin : row + begin + len(tokens)]
                found += token_logprobs(some, tokens, Asked(request.params.prompt_logprobs or 0))
            request.num_prompt_logprobs = first + count
            row += count
        return result
