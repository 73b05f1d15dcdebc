"""Samples tokens on the device, with the arithmetic of the CPU's sampler. The host waits for the device where it needs a token or a
log-probability before the next step.

Filters in the order of `engine.sampling.sampler`: temperature, top-k, top-p, min-p, typical-p.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from engine.gpu.attention import to_device
from engine.sampling.filters import bounded, draw, draw_at_once
from engine.sampling.logprobs import token_logprobs
from engine.sampling.one_row import draw_row
from engine.sampling.sampler import Sampler, adjusts, best_tokens, uniforms_of

if TYPE_CHECKING:
    from engine.messages import TokenLogprob
    from engine.request import Request
    from engine.sampling.logprobs import Asked
    from engine.sampling.one_row import BestTokens
    from engine.sampling.params import SamplingParams


ROWS_AT_ONCE = 32
"""Rows of logits that are made into log-probabilities at a time: that takes several times their memory."""


class DeviceTokens:
    """Tokens that are being copied to pinned host memory while the device goes on."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens
        self._read = tokens
        self._copied: torch.cuda.Event | None = None
        if tokens.device.type == "cuda":
            self._read = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._read.copy_(tokens, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[int]:
        if self._copied is not None:
            self._copied.synchronize()
        tokens: list[int] = self._read.tolist()
        return tokens


class DeviceSampler(Sampler):
    """Samples from logits on a device."""

    def _choose(self, logits: torch.Tensor, params: list[SamplingParams], uniforms: list[float]) -> list[int]:
        typical = [row for row, p in enumerate(params) if p.typical_p < 1 and not p.greedy]
        if not typical:
            return cast("list[int]", choose(logits, params, uniforms).tolist())
        tokens = [0] * len(params)
        others = [row for row in range(len(params)) if row not in typical]
        if others:
            drawn = choose(logits[others], [params[row] for row in others], [uniforms[row] for row in others])
            for row, token in zip(others, drawn.tolist(), strict=True):
                tokens[row] = token
        for row, best_of_row in self._best_of_each(logits, typical, params).items():
            tokens[row] = draw_row(best_of_row, params[row], uniforms[row], logits.shape[1])
        return tokens

    def _best(self, logits: torch.Tensor, temperatures: list[float], count: int) -> BestTokens:
        """On the host, which looks at rows one by one."""
        values, ids, totals = best_tokens(logits.float(), temperatures, count)
        return values.cpu(), ids.cpu(), totals.cpu()

    def _scored(
        self, logits: torch.Tensor, rows: list[int], temperatures: list[float], tokens: list[int], asked: Asked
    ) -> list[TokenLogprob]:
        found = []
        for begin in range(0, len(rows), ROWS_AT_ONCE):
            some = slice(begin, begin + ROWS_AT_ONCE)
            heat = to_device(torch.tensor(temperatures[some]), logits.device)[:, None]
            found += token_logprobs(logits[rows[some]] / heat, tokens[some], asked)
        return found

    def choose_later(self, rows: list[tuple[Request, int]], logits: torch.Tensor) -> DeviceTokens | None:
        """None also for top-p or min-p without top-k, because the host must check that the candidates suffice."""
        params = [request.params for request, _ in rows]
        vocab = logits.shape[1]
        if any(p.logprobs is not None or adjusts(request) for p, (request, _) in zip(params, rows, strict=True)):
            return None
        if any(p.filtered and not p.greedy and (p.typical_p < 1 or not bounded(p, vocab)) for p in params):
            return None
        greedy = all(p.greedy for p in params)
        return DeviceTokens(logits.argmax(-1) if greedy else choose(logits, params, uniforms_of(rows)))


def choose(logits: torch.Tensor, params: list[SamplingParams], uniforms: list[float]) -> torch.Tensor:
    """Sample a token [B] for every row of logits [B, V]. The host waits for the device only to check whether the first
    candidates sufficed, and only for top-p and min-p without top-k.
    """
    likeliest = logits.argmax(-1)
    if all(p.greedy for p in params):
        return likeliest
    device, vocab = logits.device, logits.shape[1]

    def column(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return to_device(torch.tensor(values, dtype=dtype), device)[:, None]

    greedy = column([float(p.greedy) for p in params], torch.bool)
    scaled = logits.float() / column([1.0 if p.greedy else p.temperature for p in params])
    filtered = [row for row, p in enumerate(params) if p.filtered and not p.greedy]
    chosen = likeliest
    if len(filtered) < len(params):
        cumulative = scaled.softmax(-1, dtype=torch.float64).cumsum(-1)
        u = column(uniforms, torch.float64)
        drawn = torch.searchsorted(cumulative, u * cumulative[:, -1:]).clamp_(max=vocab - 1)[:, 0]
        chosen = torch.where(greedy[:, 0], likeliest, drawn)
    if filtered:  # separately, because a row's computation must not depend on the other rows
        index = to_device(torch.tensor(filtered), device)
        of_filtered = scaled.index_select(0, index)
        normalised = of_filtered - of_filtered.amax(-1, keepdim=True)

        def candidates(rows: list[int], count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            of_rows = normalised if len(rows) == len(filtered) else normalised[rows]
            return (*of_rows.topk(count), of_rows.logsumexp(-1, keepdim=True))

        theirs, places = [params[row] for row in filtered], [uniforms[row] for row in filtered]
        if all(bounded(p, vocab) for p in theirs):
            tokens = draw_at_once(candidates, theirs, places, vocab)
        else:
            tokens = to_device(torch.tensor(draw(candidates, theirs, places, vocab)), device)
        chosen.index_copy_(0, index, tokens)
    return chosen
