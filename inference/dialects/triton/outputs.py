"""The output tensors of a generation, in the names of Triton's vLLM backend, TensorRT-LLM and MindIE.

Every tensor has an element, or a row, for each of the request's n sequences, in a stream too: a sequence without news has an
empty text there. `cumulative_logprob` and `finish_reason` are those of the sequence so far; the others are of the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from inference.dialects.triton.tensors import Tensor
from inference.vendors.openai_logprobs import floor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.messages import TokenLogprob
    from inference.dialects.triton.parameters import Parameters
    from inference.generation.deltas import Delta
    from inference.generation.generation import Generation

IDS = {"output0", "output_ids"}
DEFAULTS = {"text_input": ("text_output",), "input0": ("output0",), "input_ids": ("output_ids", "sequence_length")}
"""The outputs of a request that names none, by its prompt's tensor."""
FLAGGED = {
    "return_finish_reason": ("finish_reason",),
    "return_cumulative_logprob": ("cumulative_logprob",),
    "return_logprobs": ("logprobs",),
    "return_num_input_tokens": ("num_input_tokens",),
    "return_num_output_tokens": ("num_output_tokens",),
    "return_log_probs": ("cum_log_probs", "output_log_probs"),
}
"""The outputs that a flag adds."""
PLAIN = ("text_output", "output0", "output_ids", "sequence_length")
NAMES = frozenset([*PLAIN, *(name for names in FLAGGED.values() for name in names)])


class Outputs:
    """Collects the deltas of a generation.

    `wanted`: the outputs that the request names; empty for the defaults of `prompt`, the prompt's tensor. A named output whose flag
    is not set is left out, as by the vendors' backends. `before`: what is repeated before the output: a text, or token ids.
    """

    def __init__(
        self,
        generation: Generation,
        parameters: Parameters,
        prompt: str,
        wanted: Sequence[str],
        before: str | list[int],
    ) -> None:
        self._generation, self._parameters = generation, parameters
        names = [name for name in wanted if name in PLAIN] if wanted else list(DEFAULTS[prompt])
        for flag, added in FLAGGED.items():
            if parameters.flag(flag):
                names += [name for name in added if not wanted or name in wanted]
        self._names, self._before = names, before
        self._whole = [_Piece() for _ in range(generation.request.n)]

    @property
    def pieces(self) -> list[_Piece]:
        """The sequences so far."""
        return self._whole

    def add(self, delta: Delta) -> None:
        """Add a delta to the complete response."""
        self._whole[delta.index].add(delta)

    def whole(self) -> list[Tensor]:
        """The outputs of the complete response."""
        return self._tensors(self._whole, self._before)

    def step(self, delta: Delta) -> list[Tensor]:
        """The outputs of one delta, without the prompt."""
        piece = self._whole[delta.index]
        piece.start_step()
        piece.add(delta)
        news = [piece if index == delta.index else each.silent() for index, each in enumerate(self._whole)]
        return self._tensors(news, "")

    def _tensors(self, pieces: list[_Piece], before: str | list[int]) -> list[Tensor]:
        return [self._tensor(name, pieces, before) for name in self._names]

    def _tensor(self, name: str, pieces: list[_Piece], before: str | list[int]) -> Tensor:
        count = len(pieces)
        if name == "text_output":
            prompt = before if isinstance(before, str) else ""
            return Tensor(name, "BYTES", [count], [prompt + piece.text for piece in pieces])
        if name in IDS or name == "sequence_length":
            return self._ids(name, pieces, before if isinstance(before, list) else [])
        if name == "finish_reason":  # "None" before the end, as from vLLM's backend
            return Tensor(name, "BYTES", [count], [str(piece.finish) for piece in pieces])
        if name == "cumulative_logprob":
            return Tensor(name, "FP32", [count], [piece.cumulative for piece in pieces])
        if name == "logprobs":
            return Tensor(name, "BYTES", [count], [self._logprobs(piece) for piece in pieces])
        if name == "num_input_tokens":
            return Tensor(name, "UINT32", [1], [self._generation.usage.prompt_tokens])
        if name == "num_output_tokens":
            return Tensor(name, "UINT32", [count], [len(piece.ids) for piece in pieces])
        if name == "cum_log_probs":
            return Tensor(name, "FP32", [1, count], [piece.cumulative for piece in pieces])
        rows = _rows([[token.logprob for token in piece.logprobs] for piece in pieces], 0.0)
        return Tensor(name, "FP32", [1, count, len(rows[0])], [value for row in rows for value in row])

    def _ids(self, name: str, pieces: list[_Piece], before: list[int]) -> Tensor:
        ids = [[*before, *piece.ids] for piece in pieces]
        if name == "sequence_length":
            return Tensor(name, "INT32", [1, len(ids)], [len(row) for row in ids])
        if name == "output_ids":
            rows = _rows(ids, 0)
            return Tensor(name, "INT32", [1, len(rows), len(rows[0])], [token for row in rows for token in row])
        joined = [token for row in ids for token in row]
        return Tensor(name, "UINT32", [1, len(joined)], joined)

    def _logprobs(self, piece: _Piece) -> str:
        """One object for each token, in the format of Triton's vLLM backend: null without `logprobs`."""
        top = self._parameters.logprobs
        return "null" if top is None else msgspec.json.encode([self._ranked(t, top) for t in piece.logprobs]).decode()

    def _ranked(self, token: TokenLogprob, top: int) -> dict[str, Any]:
        """The token and the likeliest others, by id."""
        text = self._generation.target.tokenizer.token_text
        found = [(token.token_id, token.logprob, token.rank)]
        found += [(i, value, rank) for rank, (i, value) in enumerate(token.top[:top], 1) if i != token.token_id]
        return {str(i): {"logprob": floor(value), "rank": rank, "decoded_token": text(i)} for i, value, rank in found}


class _Piece:
    """The output of one sequence, or of its last step."""

    def __init__(self) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.finish: str | None = None
        self.ended_by_eos = False
        self.logprobs: list[TokenLogprob] = []
        self.cumulative = 0.0

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.cumulative += sum(token.logprob for token in delta.logprobs or [])
        self.finish = delta.finish_reason or self.finish
        self.ended_by_eos = self.ended_by_eos or delta.ended_by_eos

    def start_step(self) -> None:
        """Forget what is not of the sequence as a whole."""
        self.text, self.ids, self.logprobs = "", [], []

    def silent(self) -> _Piece:
        """The sequence in a step that adds nothing to it."""
        piece = _Piece()
        piece.finish, piece.ended_by_eos, piece.cumulative = self.finish, self.ended_by_eos, self.cumulative
        return piece


def _rows(rows: list[list[Any]], filling: float) -> list[list[Any]]:
    """The rows, filled up to the longest."""
    longest = max(len(row) for row in rows)
    return [row + [filling] * (longest - len(row)) for row in rows]
