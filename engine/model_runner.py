"""One step's arithmetic: tensors in, tokens and log-probabilities out. It decides nothing about requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from engine.batch import build_batch
from engine.sampler import token_logprobs

if TYPE_CHECKING:
    from engine.backend import Backend
    from engine.messages import TokenLogprob
    from engine.model import LoadedModel
    from engine.request import Request
    from engine.scheduler import ScheduledBatch


@dataclass(slots=True)
class StepResult:
    """What a step computed, by request: one token each, and further ones where guesses were right."""

    tokens: dict[Request, list[int]] = field(default_factory=dict)
    logprobs: dict[Request, list[TokenLogprob]] = field(default_factory=dict)
    prompt_logprobs: dict[Request, list[TokenLogprob]] = field(default_factory=dict)


class ModelRunner:
    """Runs scheduled batches through the model, the KV cache and the sampler."""

    def __init__(self, backend: Backend, loaded: LoadedModel, cache: Any) -> None:
        """`cache` is one that the backend made."""
        self.backend, self.forward, self.cache = backend, loaded.forward, cache
        self.sampler = backend.sampler(loaded.eos_token_ids)

    @torch.inference_mode()
    def execute(self, scheduled: ScheduledBatch) -> StepResult:
        """One forward pass and one token for every request that reached the end of its tokens."""
        batch = build_batch(scheduled, self.cache.block_size)
        logits = self.backend.run(self.forward, self.cache, batch)
        result = StepResult()
        if batch.sampled:
            tokens, logprobs = self.sampler.sample(batch.sampled, logits[: len(batch.sampled)])
            for (request, number), token, logprob in zip(batch.sampled, tokens, logprobs, strict=True):
                chosen = result.tokens.setdefault(request, [])
                if chosen[:number] != batch.drafts.get(request, [])[:number]:
                    continue  # it was computed behind a guess that was wrong
                chosen.append(token)
                if logprob is not None:
                    result.logprobs.setdefault(request, []).append(logprob)
        row = len(batch.sampled)
        for request, first, count in batch.prompt_rows:
            following = request.token_ids[first + 1 : first + count + 1]
            top = request.params.prompt_logprobs or 0
            result.prompt_logprobs[request] = token_logprobs(logits[row : row + count].cpu(), following, top)
            request.num_prompt_logprobs = first + count
            row += count
        return result
