"""Verifies that a model's logits on the paged path equal those of transformers' forward pass. No model is accepted by
name.

A model's computation may depend on the length of a sequence, on a token's position and, by mistake, on its row in the
step. So prompts are computed in ragged chunks over scattered blocks: once as they are, once with positions from the
whole served range, and once with every limit of the configuration lowered.
"""

from __future__ import annotations

import inspect
import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from engine.batch import build_batch
from engine.block_pool import BlockPool
from engine.models import record
from engine.models.limits import LOWERED, lowered, named_lengths
from engine.models.long_rope import LONG
from engine.models.record import ProbeError, record_layers, stateful_modules
from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.scheduled_batch import ScheduledBatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from engine.backend import Backend, Forward
    from engine.batch import ForwardBatch
    from engine.shapes import AttentionSpec

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
ROUNDING = 1.7e-2
"""Times the square root of the number of layers, for bfloat16: its rounding adds up over layers, in the reference too. With random weights of
the shape of Qwen2.5-7B, transformers' own bfloat16 logits differ from its float32 ones by 2.2e-2 after 8 layers and by 4.4e-2 after 28.
"""
BLOCK_SIZE = 4
PLAIN_TOKENS = 23
LOWERED_TOKENS = (38, 19)
CHUNKS = (9, 13, 17)
"""Rows of a prompt in successive steps, repeated; its last token is computed without other tokens of the prompt."""


def tolerance_of(dtype: torch.dtype, num_layers: int) -> float:
    """The largest difference of logits that rounding explains, relative to the largest logit."""
    least = TOLERANCE[dtype]
    return max(least, ROUNDING * math.sqrt(num_layers)) if dtype == torch.bfloat16 else least


@dataclass(slots=True)
class Prompt:
    """A prompt: token ids, and a position for each."""

    ids: list[int]
    positions: list[int]
    expected: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """[tokens, V] float32: the reference logits of transformers."""


@dataclass(slots=True)
class Case:
    """Prompts that share steps, the layers as recorded for them, and the limits that were lowered."""

    prompts: list[Prompt]
    specs: list[AttentionSpec]
    limits: dict[str, int]


class Proof:
    """Reference logits of transformers' forward pass, computed before the model is modified."""

    def __init__(
        self, model: PreTrainedModel, num_layers: int, vocab_size: int, longest: int, original_length: int | None = None
    ) -> None:
        """`longest`: the longest sequence that will be served; those over the `original_length` have rotary embeddings
        of their own. Raises ProbeError if a layer is not supported.
        """
        self._model, self._longest, self._original_length = model, longest, original_length
        generator = torch.Generator().manual_seed(0)

        def prompt(positions: list[int]) -> Prompt:
            return Prompt(torch.randint(vocab_size, (len(positions),), generator=generator).tolist(), positions)

        plain = [prompt([*range(min(PLAIN_TOKENS, longest))]), prompt(self._spread())]
        short = [prompt([*range(min(n, longest))]) for n in LOWERED_TOKENS]
        _compute(model, plain[:1])
        failure = None
        try:
            _compute(model, plain[1:])
            with lowered(model, longest) as limits:
                if limits:
                    _compute(model, short)
        except ProbeError as error:  # a layer's failure is more useful than the error of a model without positions
            failure = error
        record.install()
        model.set_attn_implementation(record.NAME)
        self.specs = record_layers(model, num_layers, longest)
        if failure is not None:
            raise failure
        self.cases = [Case(plain, self.specs, {})]
        with lowered(model, longest) as limits:
            if limits:
                self.cases.append(Case(short, record_layers(model, num_layers, longest), limits))

    def check(self, backend: Backend, forward: Forward, dtype: torch.dtype, tolerance: float) -> None:
        """Compute the prompts through a small paged cache and compare the logits of every token; raises ProbeError."""
        for case in self.cases:
            with lowered(self._model, self._longest) if case.limits else nullcontext():
                measured = _run(backend, forward, case, dtype, self._original_length)
            for number, (prompt, found) in enumerate(zip(case.prompts, measured, strict=True)):
                difference = _difference(found, prompt.expected, tolerance <= TOLERANCE[torch.float32])
                if not difference <= tolerance:
                    raise ProbeError(self._reason(case, number, difference, tolerance))

    def _spread(self) -> list[int]:
        """Positions over the served range, dense at its start and around every length in the configuration."""
        marks = {*range(6), *(2**n for n in range(self._longest.bit_length())), self._longest - 2, self._longest - 1}
        for length in named_lengths(self._model):
            marks |= {length - 1, length, length + 1, 2 * length}
        return sorted(mark for mark in marks if 0 <= mark < self._longest)

    def _reason(self, case: Case, number: int, difference: float, tolerance: float) -> str:
        reason = f"its paged logits differ from transformers' own by {difference:.1e} (at most {tolerance:.2g})"
        state = stateful_modules(self._model)
        if case.limits:
            names = ", ".join(f"{name} {value}" for name, value in sorted(case.limits.items()))
            return f"{reason} once a limit is passed ({names}; lowered to {LOWERED} for the proof)"
        if state:
            return f"it keeps state beside keys and values ({', '.join(state)}), which is not supported: {reason}"
        if "position_ids" not in inspect.signature(self._model.forward).parameters:
            return f"it takes no positions but counts rows, so sequences cannot share a step: {reason}"
        if number:
            return f"{reason} for tokens at positions up to {self._longest - 1}"
        return f"{reason} where sequences share a step: it may count rows instead of reading positions"


@torch.inference_mode()
def _compute(model: PreTrainedModel, prompts: list[Prompt]) -> None:
    """Compute the prompts' reference logits with transformers' forward pass."""
    for prompt in prompts:
        ids = torch.tensor([prompt.ids], device=model.device)
        options = {}
        if prompt.positions != [*range(len(prompt.ids))]:
            # The mask marks one sequence; without it, gaps between positions would look like several.
            positions = torch.tensor([prompt.positions], device=model.device)
            options = {"position_ids": positions, "attention_mask": torch.ones_like(ids)}
        try:
            prompt.expected = model(input_ids=ids, use_cache=False, **options).logits[0].float().cpu()
        except Exception as error:  # model families fail in different ways; the reason goes to the operator
            raise ProbeError(f"its forward pass fails ({type(error).__name__}: {error})") from error


@torch.inference_mode()
def _run(
    backend: Backend, forward: Forward, case: Case, dtype: torch.dtype, original_length: int | None
) -> list[torch.Tensor]:
    """The logits [tokens, V] of every prompt, computed over a paged cache."""
    num_blocks = 2 + sum(-(-len(prompt.ids) // BLOCK_SIZE) for prompt in case.prompts)
    pool = BlockPool(num_blocks, BLOCK_SIZE, prefix_caching=False)
    cache = backend.new_cache(case.specs, num_blocks, BLOCK_SIZE, dtype)
    requests = [Request((0, i), prompt.ids, SamplingParams(max_tokens=1), 0.0) for i, prompt in enumerate(case.prompts)]
    parts: list[list[torch.Tensor]] = [[] for _ in requests]
    for step in _steps(requests):
        for request, count in reversed(step):  # interleaved allocation, so that blocks are not all consecutive
            pool.allocate(request, request.num_computed_tokens + count)
        batch = build_batch(ScheduledBatch([r for r, _ in step], [n for _, n in step]), BLOCK_SIZE)
        _place(batch, case, step, sys.maxsize if original_length is None else original_length)
        try:
            logits = backend.run(forward, cache, batch)
        except Exception as error:  # as above
            raise ProbeError(f"it does not run on ragged batches ({type(error).__name__}: {error})") from error
        if len(logits) != len(batch.logits_rows):
            raise ProbeError(f"it gave {len(logits)} rows of logits where {len(batch.logits_rows)} were asked for")
        logits = logits.float().cpu().flip(0)
        for (request, count), rows in zip(step, batch.sequences, strict=True):
            parts[request.key[1]].append(logits[rows.row : rows.row + count])
            request.num_computed_tokens += count
    return [torch.cat(part) for part in parts]


def _steps(requests: list[Request]) -> Iterator[list[tuple[Request, int]]]:
    """The steps: (request, number of its tokens) for each prompt in the step."""
    number = 0
    while any(request.num_computed_tokens < len(request.token_ids) for request in requests):
        step = []
        for i, request in enumerate(requests):
            left = len(request.token_ids) - request.num_computed_tokens
            if left:
                step.append((request, max(1, min(CHUNKS[(number + i) % len(CHUNKS)], left - 1))))
        yield step
        number += 1


def _place(batch: ForwardBatch, case: Case, step: list[tuple[Request, int]], original_length: int) -> None:
    """Set the prompts' positions in the batch, and request the logits of all their rows, the last first."""
    placed: list[int] = []
    for request, count in step:
        positions, first = case.prompts[request.key[1]].positions, request.num_computed_tokens
        mark = LONG if max(positions) >= original_length else 0
        placed += [mark + position for position in positions[first : first + count]]
    batch.logits_rows = torch.arange(len(placed)).flip(0)
    batch.positions = torch.tensor([placed + [0] * (batch.input_ids.shape[1] - len(placed))])


def _difference(found: torch.Tensor, expected: torch.Tensor, exact: bool) -> float:
    """The largest absolute logit error relative to the largest logit: over all tokens if `exact`.

    In low precision a mixture-of-experts router may pick another expert for a token. So the result is then the maximum of
    the median over tokens and the smaller error of the last two tokens, which are beyond all limits.
    """
    errors = (found - expected).abs().amax(1) / expected.abs().max().clamp_min(1e-6)
    if bool(errors.isnan().any()):
        return math.inf
    return float(errors.max() if exact else torch.maximum(errors.median(), errors[-2:].min()))
