"""Samples tokens from logits. Given the logits, a token depends only on the request's seed and the token's position.

Each token takes one uniform number, computed by splitmix64 from (seed, output position), through the inverse of the
cumulative distribution; so neither other requests of the batch nor preemption change what a request samples.
Order of the steps: grammar, logit bias and bans, minimum length, penalties, temperature, top-k, top-p, min-p, typical-p
(the filters in the order of transformers' warpers).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from engine.cpu.kernels import ops
from engine.messages import TokenLogprob
from engine.sampling.adjustments import adjust
from engine.sampling.filters import CANDIDATES, draw
from engine.sampling.logprobs import Asked, filtered_logprob, token_logprobs
from engine.sampling.one_row import draw_row, first_count
from engine.sampling.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.request import Request
    from engine.sampling.one_row import Best, BestTokens

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
            return self._draw_together(logits, params, uniforms)
        chosen = ops.choose(logits, [0.0 if p.greedy else p.temperature for p in params], uniforms)
        if drawn:
            tokens = self._draw_together(logits[drawn], [params[r] for r in drawn], [uniforms[r] for r in drawn])
            for row, token in zip(drawn, tokens, strict=True):
                chosen[row] = token
        typical = [row for row, p in enumerate(params) if p.typical_p < 1 and not p.greedy]
        for row, best_of_row in self._best_of_each(logits, typical, params).items():
            chosen[row] = draw_row(best_of_row, params[row], uniforms[row], logits.shape[1])
        return chosen

    def _draw_together(self, logits: torch.Tensor, params: list[SamplingParams], uniforms: list[float]) -> list[int]:
        """Sample a token for every row of logits [B, V] from those that top-k, top-p and min-p keep."""

        def candidates(rows: list[int], count: int) -> BestTokens:
            of_rows = logits if len(rows) == len(params) else logits[rows]
            return self._best(of_rows, [params[row].temperature for row in rows], count)

        return draw(candidates, params, uniforms, logits.shape[1])

    def _best_of_each(self, logits: torch.Tensor, rows: list[int], params: list[SamplingParams]) -> dict[int, Best]:
        """The most likely tokens of each of `rows`, of which those that are looked at first are found together."""

        def of_row(row: int, first: int, known: BestTokens) -> Best:
            heat = [params[row].temperature]
            return lambda count: known if count == first else self._best(logits[row : row + 1], heat, count)

        vocab = logits.shape[1]
        found: dict[int, Best] = {}
        alike: dict[int, list[int]] = {}
        for row in rows:
            alike.setdefault(first_count(params[row], vocab), []).append(row)
        for first, same in alike.items():
            for some in [same] if first < vocab else [[row] for row in same]:  # whole vocabularies one by one
                of_some = logits if len(some) == len(logits) else logits[some]
                values, ids, totals = self._best(of_some, [params[row].temperature for row in some], first)
                for n, row in enumerate(some):
                    found[row] = of_row(row, first, (values[n : n + 1], ids[n : n + 1], totals[n : n + 1]))
        return found

    def _best(self, logits: torch.Tensor, temperatures: list[float], count: int) -> BestTokens:
        """The `count` best of each row of logits [B, V], as `engine.sampling.filters.Candidates` gives them."""
        if count == logits.shape[1]:
            return best_tokens(logits, temperatures, count)
        found = ops.select(logits, temperatures, count)
        if count <= CANDIDATES:  # equals in the order of their ids
            values, order = (part[:, :count] for part in found.values.sort(dim=-1, descending=True, stable=True))
        else:
            values, order = found.values.topk(count)
        heat = torch.tensor(temperatures)[:, None]
        chosen = (values - values[:, :1]) / heat, found.ids.gather(1, order), found.log_totals
        for row in found.overflown:  # each by itself, so that the others do not depend on it
            here = slice(row, row + 1)
            for target, source in zip(chosen, best_tokens(logits[here], temperatures[here], count), strict=True):
                target[here] = source
        return chosen

    def _logprobs(
        self, params: list[SamplingParams], raw: torch.Tensor | None, processed: torch.Tensor, chosen: list[int]
    ) -> list[TokenLogprob | None]:
        """The log-probabilities that are asked for. Rows that ask for the same are computed together, except those with filters."""
        logprobs: list[TokenLogprob | None] = [None] * len(params)
        alike: dict[Asked, list[int]] = {}
        filtered: list[int] = []
        for row, p in enumerate(params):
            if p.logprobs is None:
                continue
            named = None if p.logprob_token_ids is None else tuple(p.logprob_token_ids)
            if p.logprobs_mode == "raw" or p.greedy or not p.filtered:
                alike.setdefault(Asked(p.logprobs, p.logprobs_mode, named), []).append(row)
            elif p.logprobs or named is not None:  # however unlikely the alternatives are
                exact = partial(best_tokens, processed[row : row + 1], [p.temperature])
                logprobs[row] = filtered_logprob(processed[row], exact, p, chosen[row])
            else:
                filtered.append(row)
        for asked, rows in alike.items():
            of_raw = asked.mode == "raw"
            about = raw if of_raw and raw is not None else processed
            heat = [1.0 if of_raw or params[row].greedy else params[row].temperature for row in rows]
            found = self._scored(about, rows, heat, [chosen[row] for row in rows], asked)
            for row, one in zip(rows, found, strict=True):
                logprobs[row] = one
        for row, best_of_row in self._best_of_each(processed, filtered, params).items():
            logprobs[row] = filtered_logprob(processed[row], best_of_row, params[row], chosen[row])
        return logprobs

    def _scored(
        self, logits: torch.Tensor, rows: list[int], temperatures: list[float], tokens: list[int], asked: Asked
    ) -> list[TokenLogprob]:
        """`token_logprobs` of some rows of logits [B, V] at these temperatures, by kernels for few alternatives."""

        def exact(n: int) -> TokenLogprob:
            """Each row by itself, so that it is rounded alike in any batch."""
            of_row = logits[rows[n] : rows[n] + 1]
            return token_logprobs(
                of_row if temperatures[n] == 1 else of_row / temperatures[n], tokens[n : n + 1], asked
            )[0]

        most = min(CANDIDATES, logits.shape[1] - 1) if asked.mode == "raw" else 0  # other modes list equals too
        if asked.named is not None or not 0 <= asked.top <= most:
            return [exact(n) for n in range(len(rows))]
        values, ranks = ops.scores(logits, rows, temperatures, tokens)
        if not asked.top:
            return [TokenLogprob(*row) for row in zip(tokens, values, ranks, strict=True)]
        best, ids, totals = self._best(logits if len(rows) == len(logits) else logits[rows], temperatures, asked.top)
        found = []
        for n, listed in enumerate(zip(ids.tolist(), (best - totals).tolist(), strict=True)):
            value_of = dict(zip(*listed, strict=True))
            if -torch.inf in value_of.values():  # less likely than the kernels look for
                found.append(exact(n))
            else:
                value = value_of.get(tokens[n], values[n])
                found.append(TokenLogprob(tokens[n], value, ranks[n], list(value_of.items())))
        return found


def uniforms_of(rows: list[tuple[Request, int]]) -> list[float]:
    """The uniform number of each row's token."""
    return [uniform(request.params.seed, request.num_output_tokens + ahead) for request, ahead in rows]


def adjusts(request: Request) -> bool:
    """Whether the request's parameters change the model's logits at this position."""
    p = request.params
    young = request.num_output_tokens < p.min_tokens
    return bool(
        request.matcher is not None or young or p.logit_bias or p.allowed_token_ids or p.bad_words or p.penalised
    )


def best_tokens(logits: torch.Tensor, temperatures: list[float], count: int) -> BestTokens:
    """The `count` best of each row of logits [B, V], as `engine.sampling.filters.Candidates` gives them, on any device."""
    heat = torch.tensor(temperatures).to(logits.device)[:, None]
    scaled = (logits - logits.amax(-1, keepdim=True)) / heat
    return (*scaled.topk(count), scaled.logsumexp(-1, keepdim=True))
