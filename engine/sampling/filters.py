"""top-k, top-p and min-p over many rows at once, in the order of transformers' warpers. It samples and changes no
logits.

Only the top candidates are examined, normalised over the whole vocabulary; more are fetched if they do not suffice, so
the results are exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from engine.sampling.params import SamplingParams

CANDIDATES = 256
"""The number of most likely tokens that filtered sampling examines first."""


class Candidates(Protocol):
    """The source of the most likely tokens."""

    def __call__(self, rows: list[int], count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The `count` most likely tokens of these rows: values (x - best) / temperature [B, count], best first, -inf
        for negligible tokens; their ids [B, count]; and the log-sum-exp [B, 1] of the values over the whole vocabulary.
        """
        ...


def draw(candidates: Candidates, params: list[SamplingParams], uniforms: list[float], vocab: int) -> list[int]:
    """Sample a token for every row; without filters in a row's parameters, from the whole vocabulary.

    The number of candidates of a row depends on that row only, so that its sums are rounded equally in every batch.
    """
    tokens = [0] * len(params)
    waiting: dict[int, list[int]] = {}
    for row, p in enumerate(params):
        count = CANDIDATES if p.filtered else vocab
        while count < min(p.top_k, vocab):
            count *= 16
        waiting.setdefault(min(count, vocab), []).append(row)
    while waiting:
        count = min(waiting)
        rows = sorted(waiting.pop(count))  # rows that come back may stand before those that begin here
        chosen = [params[row] for row in rows]
        drawn, enough = _attempt(*candidates(rows, count), chosen, [uniforms[row] for row in rows], vocab)
        for row, token, good in zip(rows, drawn.tolist(), enough.tolist(), strict=True):
            if good or count == vocab:
                tokens[row] = token
            else:
                waiting.setdefault(min(vocab, count * 16), []).append(row)
    return tokens


def bounded(p: SamplingParams, vocab: int) -> bool:
    """Whether the first candidates are always enough for these parameters."""
    return 0 < p.top_k <= min(CANDIDATES, vocab)


def draw_at_once(
    candidates: Candidates, params: list[SamplingParams], uniforms: list[float], vocab: int
) -> torch.Tensor:
    """`draw` without waiting for the device: the tokens as a tensor [B]. All rows must be `bounded`."""
    drawn, _ = _attempt(*candidates([*range(len(params))], min(CANDIDATES, vocab)), params, uniforms, vocab)
    return drawn


def _attempt(
    values: torch.Tensor,
    ids: torch.Tensor,
    log_totals: torch.Tensor,
    params: list[SamplingParams],
    uniforms: list[float],
    vocab: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token [B] for every row, and whether [B] the row's candidates sufficed to sample it."""
    device = values.device

    def column(numbers: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True)[:, None]

    top_k = column([p.top_k if 0 < p.top_k < vocab else vocab for p in params])
    top_p, min_p = column([p.top_p for p in params]), column([p.min_p for p in params])
    has_k = top_k < vocab
    kept = values.masked_fill(torch.arange(values.shape[1], device=device) >= top_k, -torch.inf)
    # top-k renormalises before top-p looks at the mass
    weights = torch.where(has_k, kept.softmax(-1), (kept - log_totals).exp())
    cumulative = weights.cumsum(-1)
    enough = has_k | ((top_p < 1) & (cumulative[:, -1:] >= top_p))
    enough |= (min_p > 0) & (weights[:, -1:] < min_p * weights[:, :1])
    keep = (weights > 0) & ((cumulative - weights < top_p) | (top_p >= 1)) & (weights >= min_p * weights[:, :1])
    mass = (weights * keep).double().cumsum(-1)
    place = torch.searchsorted(mass, column(uniforms, torch.float64) * mass[:, -1:]).clamp_(max=mass.shape[1] - 1)
    return ids.gather(1, place)[:, 0], enough[:, 0]
