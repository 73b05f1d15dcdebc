"""The CUDA backend: fused layers or those of transformers, paged attention in Triton, CUDA graphs for decode."""

from __future__ import annotations

import logging
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.attention import attend_with
from engine.backend import blocks_within
from engine.batch import fill_in
from engine.gpu.attention import DeviceAttention, DeviceKVCache, block_bytes, to_device
from engine.gpu.fused import FusedDecoder
from engine.gpu.graphs import DecodeGraphs
from engine.gpu.lora import SlotLinear, Slots, add_slots
from engine.gpu.paged_attention import keys_of_split
from engine.gpu.products import MOST_ROWS, TILES
from engine.gpu.ranks import Leader, Ranks
from engine.gpu.sampling import DeviceSampler
from engine.models.forward import plain_forward

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from engine.adapters.slots import AdapterLayer
    from engine.backend import Candidate, Forward
    from engine.batch import ForwardBatch
    from engine.config import EngineConfig
    from engine.quantization.base import Quantization, QuantizedLayers
    from engine.shapes import AttentionSpec

logger = logging.getLogger(__name__)

MEMORY_SHARE = 0.9
"""The fraction of a device's memory that weights, activations and KV cache may take together."""


class DeviceBackend:
    """The backend of CUDA devices. On a CPU device, for Triton's interpreter, it runs without graphs."""

    computes_drafts = False
    """Steps with drafts cannot use the captured graphs, which costs more than drafts save."""

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device,
        quantization: Quantization | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """With several devices, rank 0 starts the other ranks here; `ranks` is given on the other ranks only."""
        self.quantization = quantization
        self._ranks = ranks or (Leader(config, device) if config.tensor_parallel_size > 1 else None)
        self._config, self.device = config, self._ranks.device if self._ranks else device
        self._slots = Slots(config.max_adapters, config.max_adapter_rank, device)
        self._layers: list[SlotLinear] = []
        self._widest = self._largest = 0
        self._graphs: DecodeGraphs | None = None

    def default_dtype(self) -> torch.dtype:
        """bfloat16, which CUDA devices multiply natively."""
        return torch.bfloat16

    def rounding(self, forward: Forward) -> str | None:
        """The reason holds for every forward function."""
        return "the device sums in an order that depends on the batch"

    def pretrained_options(self) -> dict[str, Any]:
        return {} if self._ranks is None else self._ranks.pretrained_options()

    def candidates(self, model: PreTrainedModel, specs: list[AttentionSpec]) -> list[Candidate]:
        """On one device the fused forward pass, if the model's structure allows it, then transformers' own with quantized linear
        layers and with adapter slots around the other linear layers. On several, transformers' own with split weights.
        """
        weights = [m.weight.shape for m in model.modules() if type(m) in (nn.Linear, Conv1D)]
        self._widest = max((sum(shape) for shape in weights), default=0)
        self._largest = max((shape.numel() for shape in weights), default=0)

        quantized = None if self.quantization is None else self.quantization.layers("cuda", self.device)

        def fused() -> tuple[Forward, list[AdapterLayer]]:
            made = FusedDecoder(model, specs, self._slots, quantized, self.device)
            self._layers = made.slot_layers
            return made, list(self._layers)

        def split() -> tuple[Forward, list[AdapterLayer]]:
            return plain_forward(model), []

        def slotted() -> tuple[Forward, list[AdapterLayer]]:
            self._layers = []  # with the weights of a forward pass that was not proven
            self._release()
            if quantized is not None:
                quantize(model, quantized, model.get_output_embeddings())
            model.to(self.device)
            self._layers = add_slots(model, self._slots, model.get_output_embeddings())
            return plain_forward(model), list(self._layers)

        return [fused, slotted] if self._ranks is None else [split]

    def num_blocks(self, specs: list[AttentionSpec], dtype: torch.dtype, limit: int) -> int:
        """The blocks that fit into the configured bytes, or into the memory that the model left free."""
        per_block, configured = block_bytes(specs, self._config.block_size, dtype), self._config.kv_cache_bytes
        if configured:
            count = blocks_within(configured, per_block)
        else:
            self._release()
            free, total = torch.cuda.mem_get_info(self.device)
            count = max(2, (int(free - total * (1 - MEMORY_SHARE)) - self._later_bytes(dtype)) // per_block)
        count = min(count, limit + 1)
        return count if self._ranks is None else self._ranks.minimum(count)

    def _release(self) -> None:
        """Give back the memory that torch keeps for later."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _later_bytes(self, dtype: torch.dtype) -> int:
        """Bytes that are allocated after the cache: adapter slots, the activations of the largest step, and the
        quantization's buffers.
        """
        slots = self._slots.count * self._slots.rank
        adapters = sum(
            (len(layer.parts) * layer.in_features + layer.out_features) * slots
            for layer in self._layers
            if not layer.other_rows
        )
        activations = 8 * self._config.max_num_batched_tokens * self._widest
        extra = 0 if self.quantization is None else self.quantization.extra_bytes(self._largest, dtype)
        later: int = (adapters + activations) * dtype.itemsize + extra
        return later

    def new_cache(
        self, specs: list[AttentionSpec], num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> DeviceKVCache:
        return DeviceKVCache(specs, num_blocks, block_size, dtype, self.device)

    def run(self, forward: Forward, cache: DeviceKVCache, batch: ForwardBatch) -> torch.Tensor:
        if self._ranks is None or not self._ranks.serving:
            return self._compute(forward, cache, batch)
        if not isinstance(self._ranks, Leader):
            self._ranks.share(batch.chosen)
            return self._compute(forward, cache, batch)
        try:
            self._ranks.send(batch)
            self._ranks.share(batch.chosen)
            return self._compute(forward, cache, batch)
        except Exception:
            self._ranks.give_up()
            raise

    def _compute(self, forward: Forward, cache: DeviceKVCache, batch: ForwardBatch) -> torch.Tensor:
        if self._graphs is not None and self._graphs.fits(batch):
            return self._graphs.run(batch)
        ids, positions = (to_device(t, self.device) for t in (batch.input_ids, batch.positions))
        rows = batch.logits_rows if len(batch.logits_rows) else torch.zeros(1, dtype=torch.int64)
        self._slots.begin_step(batch.segments, batch.input_ids.shape[1])
        try:
            with attend_with(DeviceAttention(cache, batch, self.device)):
                return forward(fill_in(ids, batch.chosen), positions, to_device(rows, self.device))
        finally:
            self._slots.end_step()

    def warm_up(self, forward: Forward, specs: list[AttentionSpec], cache: DeviceKVCache, max_model_len: int) -> None:
        """Compile the kernels of steps that no graph runs, and capture the decode graphs."""
        if self.device.type == "cuda":
            cache.split_keys = keys_of_split(max_model_len)
            self._compile(forward, specs, cache, cache.num_splits(max_model_len))
            graphs = DecodeGraphs(
                forward, specs, cache, self._config.max_num_seqs, max_model_len, self.device, self._slots, self._layers
            )
            captured = True
            try:
                graphs.capture()
            except (
                RuntimeError
            ) as error:  # some models read a value from the device during the pass, which a graph cannot capture
                if self._ranks is not None and isinstance(error, torch.OutOfMemoryError):
                    raise  # other ranks may have enough memory and be capturing collectives
                logger.warning("decode runs without graphs: %s", error)
                captured = False
            if self._ranks is not None:  # all ranks or none: collectives of padded and unpadded steps do not match
                captured = bool(self._ranks.minimum(int(captured)))
            if captured:
                self._graphs = graphs

    def _compile(self, forward: Forward, specs: list[AttentionSpec], cache: DeviceKVCache, max_splits: int) -> None:
        """Run padding through the model as every kind of step without adapters: else the first requests of each kind would wait for the
        compiler.
        """
        groups = {spec.num_heads // spec.num_kv_heads for spec in specs}
        steps = {*product((1, 2), {1, min(2, max_splits)}), *((rows, 1) for rows in (*TILES, MOST_ROWS + 1))}
        for rows, splits in sorted(steps):
            zeros = torch.zeros(1, rows, dtype=torch.int64, device=self.device)
            self._slots.begin_step((), rows)
            try:
                with attend_with(DeviceAttention.of_padding(cache, groups, rows, splits, self.device)):
                    forward(zeros, zeros, zeros[0])
            finally:
                self._slots.end_step()

    @property
    def captured(self) -> bool:
        """Whether decode runs captured graphs."""
        return self._graphs is not None

    def serve(self) -> None:
        """From now on, rank 0 sends the steps to the other ranks."""
        if self._ranks is not None:
            self._ranks.serving = True

    def close(self) -> None:
        if isinstance(self._ranks, Leader):
            self._ranks.close()

    def sampler(self, eos_token_ids: list[int]) -> DeviceSampler:
        return DeviceSampler(eos_token_ids)


def quantize(model: nn.Module, layers: QuantizedLayers, head: nn.Module | None) -> None:
    """Replace every `nn.Linear` and `Conv1D`, except the output layer, by its quantized layer if the method has one.
    They are replaced one by one, so that the device never holds all weights unquantized.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in (nn.Linear, Conv1D) and child is not head:
                made = layers.linear(child.weight.t() if type(child) is Conv1D else child.weight, child.bias)
                if made is not None:
                    setattr(parent, name, made)
