"""Tokens chosen on the device. Rows that need more than filters go to the CPU's sampler, whose arithmetic is the same.

Filters in the order of `engine.sampler`: temperature, top-k, top-p, min-p, typical-p.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.filters import draw
from engine.sampler import Sampler, adjusts, uniform

if TYPE_CHECKING:
    from engine.messages import TokenLogprob
    from engine.request import Request
    from engine.sampling_params import SamplingParams


class DeviceSampler(Sampler):
    """As `Sampler`, of logits on a device."""

    def sample(
        self, rows: list[tuple[Request, int]], logits: torch.Tensor
    ) -> tuple[list[int], list[TokenLogprob | None]]:
        """As `Sampler.sample`."""
        params = [request.params for request, _ in rows]
        typical = any(p.typical_p < 1 and not p.greedy for p in params)
        if typical or any(p.logprobs is not None for p in params) or any(adjusts(request) for request, _ in rows):
            return super().sample(rows, logits.float().cpu())
        uniforms = [uniform(request.params.seed, request.num_output_tokens + ahead) for request, ahead in rows]
        return choose(logits, params, uniforms).tolist(), [None] * len(rows)


def choose(logits: torch.Tensor, params: list[SamplingParams], uniforms: list[float]) -> torch.Tensor:
    """A token [B] for every row of logits [B, V]; the filters' conditions are looked up on the host, and only whether
    more candidates are needed is asked of the device.
    """
    best = logits.argmax(-1)
    if all(p.greedy for p in params):
        return best
    device, vocab = logits.device, logits.shape[1]

    def column(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)[:, None]

    greedy = column([float(p.greedy) for p in params], torch.bool)
    scaled = logits.float() / column([1.0 if p.greedy else p.temperature for p in params])
    if not any(p.filtered and not p.greedy for p in params):
        cumulative = scaled.softmax(-1, dtype=torch.float64).cumsum(-1)
        u = column(uniforms, torch.float64)
        drawn = torch.searchsorted(cumulative, u * cumulative[:, -1:]).clamp_(max=vocab - 1)[:, 0]
    else:
        normalised = scaled - scaled.amax(-1, keepdim=True)

        def candidates(rows: list[int], count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            of_rows = normalised[rows]
            return (*of_rows.topk(count), of_rows.logsumexp(-1, keepdim=True))

        drawn = torch.tensor(draw(candidates, params, uniforms, vocab)).to(device)
    return torch.where(greedy[:, 0], best, drawn)
