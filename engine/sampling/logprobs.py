"""The log-probabilities of sampled tokens, of their alternatives, and of prompts. It samples nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from engine.messages import TokenLogprob
from engine.sampling.one_row import candidates_of

if TYPE_CHECKING:
    from engine.sampling.one_row import Best
    from engine.sampling.params import SamplingParams


class Asked(NamedTuple):
    """What is asked for beside a token's own log-probability."""

    top: int
    """Most likely alternatives; -1: all."""
    mode: str = "raw"
    """"processed": also those that are as likely as the last one, as TGI does, and none that filters have removed."""
    named: tuple[int, ...] | None = None
    """These tokens instead."""


def token_logprobs(logits: torch.Tensor, tokens: list[int], asked: Asked) -> list[TokenLogprob]:
    """The log-probabilities of `tokens` under `logits` [n, V], with their alternatives."""
    top, mode, named = asked
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


def filtered_logprob(logits: torch.Tensor, best: Best, p: SamplingParams, drawn: int) -> TokenLogprob:
    """The log-probability of `drawn` in the distribution that it was sampled from, of logits [V], whose most likely tokens `best` finds.
    What the filters have removed is no alternative.
    """
    ids, weights = candidates_of(best, p, logits.shape[0])
    if not bool(weights[ids == drawn].any()):  # of equals at the edge of top-k the sampling has kept another one
        equals = ((logits[ids].to(weights.device) == float(logits[drawn])) & (weights > 0)).nonzero()[:, 0]
        ids[equals[-1:]] = drawn
    kept = weights > 0
    ids, logprobs = ids[kept], weights[kept].log().log_softmax(-1)
    found, tokens, values = ids == drawn, ids.tolist(), logprobs.tolist()
    own = float(logprobs[found][0]) if bool(found.any()) else -torch.inf
    rank = int((logprobs > own).sum()) + 1
    if p.logprob_token_ids is not None:
        value_of = dict(zip(tokens, values, strict=True))
        return TokenLogprob(drawn, own, rank, [(t, value_of[t]) for t in p.logprob_token_ids if t in value_of])
    top = len(tokens) if p.logprobs == -1 else min(p.logprobs or 0, len(tokens))
    alternatives = [(t, value) for t, value in zip(tokens, values, strict=True) if top and value >= values[top - 1]]
    return TokenLogprob(drawn, own, rank, alternatives)
