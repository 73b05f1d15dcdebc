"""Proof that a model gives the same logits on the paged path as in transformers' own. It decides nothing by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.attention import Recorder, attend_with
from engine.batch import build_batch
from engine.block_pool import BlockPool
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import ScheduledBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from engine.backend import Backend, Forward
    from engine.kv_cache import AttentionSpec

LENGTHS = (23, 11)
"""Two prompts, computed in ragged chunks, so that a model which ignores positions or batch borders is found out."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
QUANTISED_TOLERANCE = 0.4
"""Eight-bit weights move the logits; a wrong order of blocks or positions moves them by more than their own size."""
BLOCK_SIZE = 4


class ProbeError(Exception):
    """The model does not behave on the paged path; the text says how."""


def _prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, vocab_size: int) -> list[torch.Tensor]:
    """The last position's logits [V] for each probe prompt, by the model as transformers loaded it."""
    try:
        return [
            model(input_ids=torch.tensor([prompt], device=model.device), use_cache=False).logits[0, -1].float().cpu()
            for prompt in _prompts(vocab_size)
        ]
    except Exception as error:  # any family may fail in its own way; the reason goes to the operator
        raise ProbeError(f"its forward pass fails: {error}") from error


@torch.inference_mode()
def record_layers(model: PreTrainedModel, num_layers: int) -> list[AttentionSpec]:
    """One recorded forward pass: every decoder layer must call the attention interface exactly as layer 0..n-1."""
    recorder = Recorder()
    ids = torch.zeros(1, 8, dtype=torch.int64, device=model.device)
    try:
        with attend_with(recorder):
            model(input_ids=ids, position_ids=torch.arange(8, device=model.device)[None], use_cache=False)
    except Exception as error:  # as above
        raise ProbeError(f"it does not run on the attention interface: {error}") from error
    if sorted(recorder.specs) != list(range(num_layers)):
        raise ProbeError(
            f"{len(recorder.specs)} of its {num_layers} layers use the attention interface; hybrid layers are not supported"
        )
    return [recorder.specs[layer] for layer in range(num_layers)]


@torch.inference_mode()
def check_paged_logits(
    backend: Backend,
    forward: Forward,
    specs: list[AttentionSpec],
    reference: list[torch.Tensor],
    vocab_size: int,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """Compute the probe prompts in chunks through a small paged cache and compare the logits."""
    pool = BlockPool(32, BLOCK_SIZE, prefix_caching=False)
    cache = backend.new_cache(specs, 32, BLOCK_SIZE, dtype)
    requests = [
        Request((0, i), prompt, SamplingParams(max_tokens=1), 0.0) for i, prompt in enumerate(_prompts(vocab_size))
    ]
    measured: dict[int, torch.Tensor] = {}
    for chunks in ((9, 4), (13, 7), (1, 0)):
        step = [(request, n) for request, n in zip(requests, chunks, strict=True) if n]
        for request, n in reversed(step):  # interleaved allocation, so that blocks are not all consecutive
            pool.allocate(request, request.num_computed_tokens + n)
        batch = build_batch(ScheduledBatch([r for r, _ in step], [n for _, n in step]), BLOCK_SIZE)
        try:
            logits = backend.run(forward, cache, batch)
        except Exception as error:  # as above
            raise ProbeError(f"it does not run on ragged batches: {error}") from error
        for row, (request, _) in enumerate(batch.sampled):
            measured[request.key[1]] = logits[row].float().cpu()
        for request, n in step:
            request.num_computed_tokens += n
    for i, expected in enumerate(reference):
        difference = float((measured[i] - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
        if not difference <= tolerance:
            raise ProbeError(f"its paged logits differ from the reference by {difference:.1e} (at most {tolerance})")
