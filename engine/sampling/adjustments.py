"""Changes logits as the parameters of requests ask, all rows of a step at once and on the logits' device: bias, allowed tokens, bans,
watermark, penalties, in this order. Penalties read and write the tokens that occur in a request, never the whole vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.sampling.watermark import mark

if TYPE_CHECKING:
    from engine.request import Request
    from engine.sampling.params import SamplingParams

ROOM = 256
"""Different tokens that a request's counts have room for beyond those of its prompt; it doubles when they are used up."""


class Occurrences:
    """The different tokens of a request: how often each is in its prompt and in its output."""

    def __init__(self, prompt: list[int]) -> None:
        ids, counts = np.unique(np.asarray(prompt, dtype=np.int64), return_counts=True)
        self.size = len(ids)
        self._place_of = dict(zip(ids.tolist(), range(self.size), strict=True))
        self._ids = np.zeros(self.size + ROOM, dtype=np.int64)
        self._counts = np.zeros((2, self.size + ROOM), dtype=np.float32)
        self._ids[: self.size], self._counts[0, : self.size] = ids, counts
        self._counted = len(prompt)

    def catch_up(self, tokens: list[int]) -> None:
        """Count those of the request's tokens that have come since the last call."""
        for token in tokens[self._counted :]:
            place = self._place_of.setdefault(token, self.size)
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)], 1)
            if place == self.size:
                self._ids[place] = token
                self.size += 1
            self._counts[1, place] += 1
        self._counted = len(tokens)

    @property
    def ids(self) -> torch.Tensor:
        """[n] int64."""
        return torch.from_numpy(self._ids[: self.size])

    @property
    def counts(self) -> torch.Tensor:
        """[2, n] float32: in the prompt, in the output."""
        return torch.from_numpy(self._counts[:, : self.size])


@dataclass(slots=True)
class State:
    """What is kept of a request between steps, as far as its parameters need it."""

    allowed: torch.Tensor | None
    """The ids of the tokens that are allowed, on the logits' device."""
    occurrences: Occurrences | None

    @classmethod
    def of(cls, request: Request, device: torch.device) -> State:
        """That of a request at its first token here, which may follow others that another worker made."""
        p, prompt = request.params, request.token_ids[: request.num_prompt_tokens]
        allowed = torch.tensor(p.allowed_token_ids, device=device) if p.allowed_token_ids else None
        return cls(allowed, Occurrences(prompt) if _counts(p) else None)


class _Places:
    """Numbers for some places of logits [B, V]."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.ids: list[int] = []
        self.numbers: list[float] = []

    def add(self, row: int, ids: list[int], numbers: list[float]) -> None:
        self.rows += [row] * len(ids)
        self.ids += ids
        self.numbers += numbers

    def on(self, device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """The index, and the numbers."""
        index = torch.tensor([self.rows, self.ids], dtype=torch.int64).to(device)
        return (index[0], index[1]), torch.tensor(self.numbers).to(device)


def adjust(logits: torch.Tensor, requests: list[Request], eos_token_ids: list[int]) -> None:
    """Change the logits [B, V] float32 in place; one request for each row."""
    vocab, bias, bans = logits.shape[1], _Places(), _Places()
    for row, request in enumerate(requests):
        p = request.params
        if p.logit_bias:
            bias.add(row, list(p.logit_bias), list(p.logit_bias.values()))
        banned = [word[-1] for word in p.bad_words or [] if _continues(request, word[:-1])]
        if request.num_output_tokens < p.min_tokens:
            banned += [token for token in {*eos_token_ids, *p.stop_token_ids} if token < vocab]
        if banned:
            bans.add(row, banned, [-torch.inf] * len(banned))
    if bias.rows:
        index, numbers = bias.on(logits.device)
        logits[index] += numbers
    for row, request in enumerate(requests):
        allowed = _state(request, logits).allowed if request.params.allowed_token_ids else None
        if allowed is not None:
            kept = logits[row, allowed]
            logits[row] = -torch.inf
            logits[row, allowed] = kept
    if bans.rows:
        index, numbers = bans.on(logits.device)
        logits[index] = numbers
    for row, request in enumerate(requests):
        if request.params.watermark:
            mark(logits[row], request.token_ids[-1])
    penalised = [row for row, request in enumerate(requests) if _counts(request.params)]
    if penalised:
        _penalise(logits, penalised, [requests[row] for row in penalised])


def _counts(p: SamplingParams) -> bool:
    """Whether the number of a token's occurrences changes its logit."""
    return bool(p.repetition_penalty != 1 or p.frequency_penalty or p.presence_penalty or p.relative_frequency_penalty)


def _continues(request: Request, before: list[int]) -> bool:
    """Whether the output ends with these tokens, as vLLM looks for bad words."""
    begin = len(request.token_ids) - len(before)
    return begin >= request.num_prompt_tokens and request.token_ids[begin:] == before


def _state(request: Request, logits: torch.Tensor) -> State:
    if request.sampler_state is None:
        request.sampler_state = State.of(request, logits.device)
    state: State = request.sampler_state
    return state


def _penalise(logits: torch.Tensor, rows: list[int], requests: list[Request]) -> None:
    """Apply, in this order: the repetition penalty (prompt and output; the formula of CTRL), OpenAI's frequency and presence
    penalties (output), and TGI's frequency penalty (prompt and output).
    """
    found = []
    for request in requests:
        occurrences = _state(request, logits).occurrences
        assert occurrences is not None
        occurrences.catch_up(request.token_ids)
        found.append(occurrences)
    device, params = logits.device, [request.params for request in requests]
    owner = torch.repeat_interleave(torch.tensor([one.size for one in found])).to(device)
    row = torch.tensor(rows).to(device)[owner]
    ids = torch.cat([one.ids for one in found]).to(device)
    in_prompt, in_output = torch.cat([one.counts for one in found], 1).to(device)

    def of_each(numbers: list[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float32).to(device)[owner]

    x = logits[row, ids]
    if any(p.repetition_penalty != 1 for p in params):
        strength = of_each([p.repetition_penalty for p in params])
        x = torch.where(x < 0, x * strength, x / strength)
    if any(p.frequency_penalty for p in params):
        x = x - of_each([p.frequency_penalty for p in params]) * in_output
    if any(p.presence_penalty for p in params):
        x = x - of_each([p.presence_penalty for p in params]) * (in_output > 0)
    if any(p.relative_frequency_penalty for p in params):
        lengths = of_each([float(len(request.token_ids)) for request in requests])
        x = x - of_each([p.relative_frequency_penalty for p in params]) * (in_prompt + in_output) / lengths
    logits[row, ids] = x
