"""The CPU backend: its own kernels over packed weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engine.attention import attend_with
from engine.backend import blocks_within
from engine.batch import fill_in
from engine.cpu.attention import PagedAttention
from engine.cpu.fused import FusedDecoder
from engine.cpu.kernels.checks import known_after_once
from engine.cpu.kernels.threads import crowded, num_threads
from engine.cpu.kv_cache import KVCache, block_bytes, default_num_blocks
from engine.cpu.layers import pack_linears
from engine.cpu.lora import adapters_of
from engine.cpu.weight_coding import coded_weights
from engine.models.forward import plain_forward
from engine.sampling.sampler import Sampler

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from engine.adapters.slots import AdapterLayer
    from engine.backend import Candidate, Forward
    from engine.batch import ForwardBatch
    from engine.config import EngineConfig
    from engine.quantization.base import Quantization
    from engine.shapes import AttentionSpec


FEW_ROWS = 12
"""Rows of a step that need no more than one thread for torch's own operations."""


class CpuBackend:
    """The backend of CPUs."""

    device = torch.device("cpu")
    computes_drafts = True

    def __init__(self, config: EngineConfig, quantization: Quantization | None = None) -> None:
        self._config, self.quantization = config, quantization

    def default_dtype(self) -> torch.dtype:
        """bfloat16: it halves the memory that a step reads, and every CPU multiplies it about as fast as float32."""
        return torch.bfloat16

    def rounding(self, forward: Forward) -> str | None:
        """The result depends on which kernels run."""
        if isinstance(forward, FusedDecoder):
            return None
        return "layers of transformers run between our kernels, and torch rounds as it likes there"

    def _share_torch(self, forward: Forward, rows: int) -> None:
        """Set torch's thread count for a step: one, unless many rows go through torch's own operations.

        OpenMP threads spin at the end of every operation, and would take cores from the kernel pool.
        """
        ours = isinstance(forward, FusedDecoder)
        torch.set_num_threads(1 if ours or rows <= FEW_ROWS or crowded() else num_threads())

    def pretrained_options(self) -> dict[str, Any]:
        return {}

    def candidates(self, model: PreTrainedModel, specs: list[AttentionSpec]) -> list[Candidate]:
        """The fused forward pass, if the model's structure allows it, then transformers' own over packed layers."""
        layers_of = None if self.quantization is None else self.quantization.layers("cpu", self.device)
        weight_bytes = sum(weight.nbytes for weight in model.parameters())
        coded = coded_weights(self._config.weight_coding, model.dtype, weight_bytes)

        def fused() -> tuple[Forward, list[AdapterLayer]]:
            made = FusedDecoder(model, specs, layers_of, coded)
            return made, list(made.lora_layers)

        def packed() -> tuple[Forward, list[AdapterLayer]]:
            layers: list[AdapterLayer] = list(pack_linears(model, layers_of, coded))
            return plain_forward(model), layers

        return [fused, packed]

    def num_blocks(self, specs: list[AttentionSpec], dtype: torch.dtype, limit: int) -> int:
        """The blocks that fit into the configured bytes, or by default into a part of the free memory."""
        per_block, configured = block_bytes(specs, self._config.block_size, dtype), self._config.kv_cache_bytes
        count = blocks_within(configured, per_block) if configured else default_num_blocks(per_block)
        return min(count, limit + 1)

    def new_cache(self, specs: list[AttentionSpec], num_blocks: int, block_size: int, dtype: torch.dtype) -> KVCache:
        return KVCache(specs, num_blocks, block_size, dtype)

    def run(self, forward: Forward, cache: KVCache, batch: ForwardBatch) -> torch.Tensor:
        self._share_torch(forward, batch.input_ids.shape[1])
        context, ours = PagedAttention(cache, batch), isinstance(forward, FusedDecoder)
        # A step of partial chunks samples nothing, but transformers' models compute at least one row of logits.
        rows = batch.logits_rows if ours or len(batch.logits_rows) else torch.zeros(1, dtype=torch.int64)
        count, wanted = batch.input_ids.shape[1], context.wanted
        signature = (count, len(rows), count if wanted is None else len(wanted.rows))
        checked = known_after_once(cache.checked if ours else None, signature)
        with attend_with(context), adapters_of(batch.segments, count), checked:
            return forward(fill_in(batch.input_ids, batch.chosen), batch.positions, rows)

    def warm_up(self, forward: Forward, specs: list[AttentionSpec], cache: KVCache, max_model_len: int) -> None:
        """Do nothing: verification has run every kernel."""

    def sampler(self, eos_token_ids: list[int]) -> Sampler:
        return Sampler(eos_token_ids)

    def serve(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: this backend starts no processes."""
