"""Samples tokens from logits. Given the logits, a token depends only on the request's seed and the token's position.

Each token takes one uniform number, computed by splitmix64 from (seed, output position), through the inverse of the
cumulative distribution; so neither other requests of the batch nor preemption change what a request samples.
Order of the steps: grammar, logit bias and bans, minimum length, penalties, temperature, top-k, top-p, min-p, typical-p
(the filters in the order of transformers' warpers).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from engine.cpu.kernels import ops
from engine.messages import TokenLogprob
from engine.sampling.adjustments import adjust
from engine.sampling.filters import CANDIDATES, draw
from engine.sampling.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.request import Request

_MASK64 = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in (0, 1) with 53 random bits: splitmix64 of seed and position, the same on every device."""
    z = (seed + 0x9E3779B97F4A7C15 * (position + 1)) & _MASK64
    for multiplier, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        z = ((z ^ (z >> shift)) * multiplier) & _MASK64
    return ((z ^ (z >> 31)) >> 11) * 2.0**-53 + 2.0**-54


class ChosenTokens(Protocol):
    """Tokens that a device is sampling: [N] int64 on the device, one per row."""

    tokens: torch.Tensor

    def read(self) -> list[int]:
        """Wait for the device and read the tokens."""
        ...


class Sampler:
    """Samples one token per row, and computes log-probabilities on request."""

    def __init__(self, eos_token_ids: Iterable[int]) -> None:
        self.eos_token_ids = list(eos_token_ids)

    def sample(
        self, rows: list[tuple[Request, int]], logits: torch.Tensor
    ) -> tuple[list[int], list[TokenLogprob | None]]:
        """Sample a token per row of `logits` [len(rows), V], which may be modified, and compute its log-probability if
        the request asks for it. A row (request, offset) is for the token `offset` positions after the request's next
        token.
        """
        requests = [request for request, _ in rows]
        params = [request.params for request in requests]
        uniforms = uniforms_of(rows)
        if not any(p.logprobs is not None or adjusts(r) for p, r in zip(params, requests, strict=True)):
            return self._choose(logits, params, uniforms), [None] * len(requests)
        logits = logits.float()
        for row, request in enumerate(requests):
            if request.matcher is not None:
                logits[row].masked_fill_(request.matcher.forbidden().to(logits.device), -torch.inf)
        raw = logits if any(p.logprobs is not None and p.logprobs_mode == "raw" for p in params) else None
        processed = logits
        if any(map(adjusts, requests)):
            processed = logits if raw is None else logits.clone()
            adjust(processed, requests, self.eos_token_ids)
        chosen = self._choose(processed, params, uniforms)
        return chosen, self._logprobs(params, raw, processed, chosen)

    def choose_later(self, rows: list[tuple[Request, int]], logits: torch.Tensor) -> ChosenTokens | None:
        """`sample` without log-probabilities and without waiting for the device; None if that is not possible."""
        return None

    def _choose(self, logits: torch.Tensor, params: list[SamplingParams], uniforms: list[float]) -> list[int]:
        """Sample a token for every row; rows with filters other than typical-p are sampled together."""
        if any(p.filtered for p in params):
            logits = logits.float()
        drawn = [row for row, p in enumerate(params) if p.filtered and not p.greedy and p.typical_p >= 1]
        if len(drawn) == len(params):
            return _draw_together(logits, params, uniforms)
        chosen = ops.choose(logits, [0.0 if p.greedy else p.temperature for p in params], uniforms)
        if drawn:
            tokens = _draw_together(logits[drawn], [params[r] for r in drawn], [uniforms[r] for r in drawn])
            for row, token in zip(drawn, tokens, strict=True):
                chosen[row] = token
        for row, p in enumerate(params):
            if p.typical_p < 1 and not p.greedy:
                chosen[row] = draw_row(logits[row], p, uniforms[row])
        return chosen

    def _logprobs(
        self, params: list[SamplingParams], raw: torch.Tensor | None, processed: torch.Tensor, chosen: list[int]
    ) -> list[TokenLogprob | None]:
        """The log-probabilities that are asked for, each row by itself."""
        logprobs: list[TokenLogprob | None] = [None] * len(params)
        for row, p in enumerate(params):
            if p.logprobs is not None:
                distribution = distribution_of(row, p, raw, processed, chosen[row])[None]
                asked = (p.logprobs, p.logprobs_mode, p.logprob_token_ids)
                logprobs[row] = token_logprobs(distribution, [chosen[row]], *asked)[0]
        return logprobs


def uniforms_of(rows: list[tuple[Request, int]]) -> list[float]:
    """The uniform number of each row's token."""
    return [uniform(request.params.seed, request.num_output_tokens + ahead) for request, ahead in rows]


def distribution_of(
    row: int, p: SamplingParams, raw: torch.Tensor | None, processed: torch.Tensor, chosen: int
) -> torch.Tensor:
    """The logits [V] that a row's log-probabilities are about."""
    if p.logprobs_mode == "raw" and raw is not None:
        return raw[row]
    return processed[row] if p.greedy else _filtered_logits(processed[row], p, chosen)


def adjusts(request: Request) -> bool:
    """Whether the request's parameters change the model's logits at this position."""
    p = request.params
    young = request.num_output_tokens < p.min_tokens
    return bool(
        request.matcher is not None or young or p.logit_bias or p.allowed_token_ids or p.bad_words or p.penalised
    )


def token_logprobs(
    logits: torch.Tensor, tokens: list[int], top: int, mode: str = "raw", named: list[int] | None = None
) -> list[TokenLogprob]:
    """The log-probabilities of `tokens` under `logits` [n, V], each with the `top` most likely alternatives (-1: all;
    in "processed" mode also those tied with the last one, as TGI does), or with the tokens `named` as alternatives.
    """
    logprobs = torch.log_softmax(logits.float(), -1)
    index = torch.tensor(tokens, device=logits.device)[:, None]
    chosen = logprobs.gather(1, index)
    ranks = (logprobs > chosen).sum(1).add(1).tolist()
    count = logprobs.shape[1] if top == -1 else min(top, logprobs.shape[1])
    values, ids = logprobs.topk(count) if count else (logprobs[:, :0], index[:, :0])
    if named is not None:
        count, ids = 0, torch.tensor(named, device=logits.device).expand(len(tokens), -1)
        values = logprobs.gather(1, ids)
    best = [[*zip(*row, strict=True)] for row in zip(ids.tolist(), values.tolist(), strict=True)]
    if mode == "processed" and count and count < logprobs.shape[1]:
        least, listed = values[:, -1:], [{token_id for token_id, _ in row} for row in best]
        for row, token_id in ((logprobs == least) & (least > -torch.inf)).nonzero().tolist():
            if token_id not in listed[row]:
                best[row].append((token_id, best[row][count - 1][1]))
    if mode == "processed":  # what filters have removed is no alternative
        best = [[(token_id, value) for token_id, value in row if value > -torch.inf] for row in best]
    found = zip(tokens, chosen[:, 0].tolist(), ranks, best, strict=True)
    return [TokenLogprob(token, value, rank, alternatives) for token, value, rank, alternatives in found]


def _draw_together(logits: torch.Tensor, params: list[SamplingParams], uniforms: list[float]) -> list[int]:
    """Sample a token for every row of logits [B, V] from those that top-k, top-p and min-p keep."""

    def candidates(rows: list[int], count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        of_rows = logits if len(rows) == len(params) else logits[rows]
        temperatures = [params[row].temperature for row in rows]
        heat = torch.tensor(temperatures)[:, None]
        if count == logits.shape[1]:
            return _best(of_rows, heat, count)
        found = ops.select(of_rows, temperatures, count)
        values, order = found.values.topk(count)
        best = (values - values[:, :1]) / heat, found.ids.gather(1, order), found.log_totals
        for row in found.overflown:  # each by itself, so that the others do not depend on it
            here = slice(row, row + 1)
            for target, source in zip(best, _best(of_rows[here], heat[here], count), strict=True):
                target[here] = source
        return best

    return draw(candidates, params, uniforms, logits.shape[1])


def _best(logits: torch.Tensor, heat: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `count` best of each row of logits [B, V] less its best and over its temperature `heat` [B, 1], their ids [B, count], and the
    logarithms [B, 1] of the sums over whole rows.
    """
    scaled = (logits - logits.amax(-1, keepdim=True)) / heat
    return (*scaled.topk(count), scaled.logsumexp(-1, keepdim=True))


def draw_row(logits: torch.Tensor, p: SamplingParams, u: float) -> int:
    """Sample one token from `logits` [V], from those that the filters keep."""
    ids, weights = _candidates(logits / p.temperature, p)
    cumulative = weights.double().cumsum(-1)
    j = int(torch.searchsorted(cumulative, u * cumulative[-1:]))
    return int(ids[min(j, len(ids) - 1)])


def _candidates(scaled: torch.Tensor, p: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidate tokens [n], most likely first, and their weights [n], which are 0 for those that the filters remove.

    Examines the top `CANDIDATES`, normalised over the whole vocabulary, and more if the filters' mass lies beyond them.
    """
    vocab = scaled.shape[0]
    top_k = p.top_k if 0 < p.top_k < vocab else 0
    count = min(top_k or CANDIDATES, vocab)
    log_normaliser = scaled.logsumexp(-1)
    while True:
        values, ids = scaled.topk(count)
        # top-k renormalises before top-p looks at the mass
        weights = values.softmax(-1) if top_k else (values - log_normaliser).exp()
        cumulative = weights.cumsum(-1)
        enough = (
            count == vocab
            or top_k > 0
            or (p.typical_p >= 1 and p.top_p < 1 and float(cumulative[-1]) >= p.top_p)
            or (p.typical_p >= 1 and p.min_p > 0 and float(weights[-1]) < p.min_p * float(weights[0]))
        )
        if enough:
            break
        count = vocab if p.typical_p < 1 else min(vocab, count * 16)
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


def _filtered_logits(logits: torch.Tensor, p: SamplingParams, drawn: int) -> torch.Tensor:
    """The distribution that `drawn` was sampled from, as logits [V] with -inf for what the filters removed."""
    scaled = logits / p.temperature
    if not p.filtered:
        return scaled
    ids, weights = _candidates(scaled, p)
    out = torch.full_like(scaled, -torch.inf)
    out[ids] = weights.log()
    if out[drawn] == -torch.inf:  # of equals at the edge of top-k the sampling has kept another one
        equals = ids[(scaled[ids] == scaled[drawn]) & (weights > 0)]
        out[drawn] = out[equals].max() if len(equals) else -torch.inf
        out[equals[-1:]] = -torch.inf
    return out
