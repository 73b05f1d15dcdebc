"""All filters over one row of logits, typical-p included, in the order of transformers' warpers. It changes no logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from engine.sampling.filters import CANDIDATES

if TYPE_CHECKING:
    from engine.sampling.params import SamplingParams

BestTokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The most likely tokens of rows: values (x - best) / temperature [B, n], best first, -inf for negligible ones; their ids [B, n]; the
log-sum-exp [B, 1] of the values over the whole vocabulary. The ids of negligible ones mean nothing.
"""
Best = Callable[[int], BestTokens]
"""So many most likely tokens of one row."""


def draw_row(best: Best, p: SamplingParams, u: float, vocab: int) -> int:
    """Sample one token by the uniform number `u`, from those that the filters keep."""
    ids, weights = candidates_of(best, p, vocab)
    cumulative = weights.double().cumsum(-1)
    j = int(torch.searchsorted(cumulative, u * cumulative[-1:]))
    return int(ids[min(j, len(ids) - 1)])


def first_count(p: SamplingParams, vocab: int) -> int:
    """How many most likely tokens `candidates_of` asks for at first."""
    if p.top_k > 0:
        return min(p.top_k, vocab)
    return vocab if p.typical_p < 1 else min(CANDIDATES, vocab)


def candidates_of(best: Best, p: SamplingParams, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidate tokens [n], most likely first, and their weights [n], which are 0 for those that the filters remove.

    Examines the top `CANDIDATES`, normalised over the whole vocabulary, and more if the filters' mass lies beyond them.
    """
    top_k, count = p.top_k if 0 < p.top_k < vocab else 0, first_count(p, vocab)
    while True:
        values, ids, log_total = (part[0] for part in best(count))
        # top-k renormalises before top-p looks at the mass
        weights = values.softmax(-1) if top_k else (values - log_total).exp()
        cumulative = weights.cumsum(-1)
        enough = (
            count == vocab
            or top_k > 0
            or (p.top_p < 1 and float(cumulative[-1]) >= p.top_p)
            or (p.min_p > 0 and float(weights[-1]) < p.min_p * float(weights[0]))
        )
        if enough:
            break
        count = min(vocab, count * 16)
    keep = weights > 0
    if p.top_p < 1:
        keep &= cumulative - weights < p.top_p
    if p.min_p > 0:
        keep &= weights >= p.min_p * weights[0]
    if p.typical_p < 1:
        keep &= _typical(weights * keep, keep, p.typical_p)
    return ids, weights * keep


def _typical(weights: torch.Tensor, keep: torch.Tensor, mass: float) -> torch.Tensor:
    """Locally typical sampling (Meister et al. 2022): the tokens whose surprise is nearest to the entropy."""
    probabilities = weights / weights.sum()
    surprise = -probabilities.clamp_min(1e-45).log()
    distance = (surprise - (probabilities * surprise).sum()).abs().masked_fill(~keep, torch.inf)
    order = distance.argsort()
    last = int((probabilities[order].cumsum(-1) < mass).sum())
    return distance <= distance[order[min(last, len(order) - 1)]]
