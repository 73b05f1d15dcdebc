"""Tokens chosen on the device. Rows that need more than filters go to the CPU's sampler, whose arithmetic is the same.

Filters in the order of `engine.sampler`: temperature, top-k, top-p, min-p, typical-p.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.sampler import CANDIDATES, Sampler, adjusts, uniform

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
    u = column(uniforms, torch.float64)
    if not any(p.filtered and not p.greedy for p in params):
        cumulative = scaled.softmax(-1, dtype=torch.float64).cumsum(-1)
        drawn = torch.searchsorted(cumulative, u * cumulative[:, -1:]).clamp_(max=vocab - 1)
        return torch.where(greedy, best[:, None], drawn)[:, 0]
    limits = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    top_k = column([float(k) for k in limits], torch.int64)
    top_p, min_p = column([p.top_p for p in params]), column([p.min_p for p in params])
    has_k = top_k < vocab
    log_normaliser = scaled.logsumexp(-1, keepdim=True)
    count = min(vocab, max(CANDIDATES, max((k for k in limits if k < vocab), default=0)))
    # A row without filters needs the whole vocabulary.
    if any(not p.filtered and not p.greedy for p in params):
        count = vocab
    while True:
        values, ids = scaled.topk(count)
        values = values.masked_fill(torch.arange(count, device=device) >= top_k, -torch.inf)
        weights = torch.where(has_k, values.softmax(-1), (values - log_normaliser).exp())
        cumulative = weights.cumsum(-1)
        enough = greedy | has_k | ((top_p < 1) & (cumulative[:, -1:] >= top_p))
        enough |= (min_p > 0) & (weights[:, -1:] < min_p * weights[:, :1])
        if count == vocab or bool(enough.all()):
            break
        count = min(vocab, count * 16)
    keep = (weights > 0) & ((cumulative - weights < top_p) | (top_p >= 1)) & (weights >= min_p * weights[:, :1])
    mass = (weights * keep).double().cumsum(-1)
    place = torch.searchsorted(mass, u * mass[:, -1:]).clamp_(max=count - 1)
    return torch.where(greedy, best[:, None], ids.gather(1, place))[:, 0]
