"""What differs between a CPU and a CUDA device: the cache, the layers, how a step runs and where tokens are chosen."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from engine.attention import Context, PagedAttention, attend_with
from engine.batch import fill_in
from engine.cpu.fused import FusedDecoder
from engine.cpu.kernels.checks import known_after_once
from engine.cpu.kernels.int8 import has_int8_dot
from engine.cpu.kernels.threads import crowded, num_threads
from engine.cpu.kernels.tiles import MAX_ROWS
from engine.cpu.kv_cache import KVCache, block_bytes, default_num_blocks
from engine.cpu.layers import has_amx, pack_linears
from engine.cpu.lora import adapters_of
from engine.models.files import ModelError
from engine.sampling.sampler import Sampler

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from engine.adapters.slots import AdapterLayer
    from engine.batch import ForwardBatch
    from engine.config import EngineConfig
    from engine.cpu.kv_cache import AttentionSpec

logger = logging.getLogger(__name__)

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""ids [1, T], positions [1, T], rows [L] -> logits [L, V], with attention in the current context."""
Candidate = Callable[[], "tuple[Forward, list[AdapterLayer]]"]
"""Makes a way to run the model, and the layers that adapters may be put into."""


class Backend(Protocol):
    """Where a model computes."""

    device: torch.device

    def pretrained_options(self) -> dict[str, Any]:
        """What `from_pretrained` is told beside the directory and the dtype."""
        ...

    def candidates(self, model: PreTrainedModel, specs: list[AttentionSpec]) -> list[Candidate]:
        """Ways to run the model, fastest first; one raises ValueError or AttributeError where it cannot."""
        ...

    def num_blocks(self, specs: list[AttentionSpec], dtype: torch.dtype, most: int) -> int:
        """How many blocks of KV cache there is room for, `most` at most."""
        ...

    def new_cache(self, specs: list[AttentionSpec], num_blocks: int, block_size: int, dtype: torch.dtype) -> Any:
        """A KV cache."""
        ...

    def run(self, forward: Forward, cache: Any, batch: ForwardBatch) -> torch.Tensor:
        """One step's logits [L, V]."""
        ...

    def warm_up(self, forward: Forward, specs: list[AttentionSpec], cache: Any, max_model_len: int) -> None:
        """Whatever makes the first steps as fast as the later ones."""
        ...

    def sampler(self, eos_token_ids: list[int]) -> Sampler:
        """What chooses tokens of this backend's logits."""
        ...

    def serve(self) -> None:
        """All is loaded: what runs from now on are requests."""
        ...

    def close(self) -> None:
        """End what the backend started."""
        ...


def plain_forward(model: PreTrainedModel) -> Forward:
    """Transformers' own forward pass. Where it cannot be told which rows' logits are wanted, it computes all of them."""
    told = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        options = {"logits_to_keep": rows} if told else {}
        out = model(input_ids=ids, position_ids=positions, use_cache=False, **options)
        logits: torch.Tensor = out.logits[0]
        return logits if told else logits[rows]

    return forward


class CpuBackend:
    """Our own kernels over packed weights."""

    device = torch.device("cpu")

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def _share_torch(self, forward: Forward, rows: int) -> None:
        """Choose torch's own threads for a step: one, but for many rows in operations that are not our kernels.

        They wait for each other at the end of every operation, and while they do they keep our helpers' cores.
        """
        ours = isinstance(forward, FusedDecoder) and not has_amx()
        torch.set_num_threads(1 if ours or rows <= MAX_ROWS or crowded() else num_threads())

    def pretrained_options(self) -> dict[str, Any]:
        """As `Backend`."""
        return {}

    def candidates(self, model: PreTrainedModel, specs: list[AttentionSpec]) -> list[Candidate]:
        """The flat forward where the structure allows it, then transformers' own over packed layers."""
        quantised = self._config.quantization == "int8"

        def fused() -> tuple[Forward, list[AdapterLayer]]:
            made = FusedDecoder(model, specs, quantised)
            return made, list(made.lora_layers)

        def packed() -> tuple[Forward, list[AdapterLayer]]:
            layers: list[AdapterLayer] = list(pack_linears(model, quantised))
            return plain_forward(model), layers

        return [fused, packed]

    def num_blocks(self, specs: list[AttentionSpec], dtype: torch.dtype, most: int) -> int:
        """As `Backend`: of the bytes that were asked for, or of the memory that is free."""
        per_block = block_bytes(specs, self._config.block_size, dtype)
        return default_num_blocks(per_block, self._config.kv_cache_bytes, most)

    def new_cache(self, specs: list[AttentionSpec], num_blocks: int, block_size: int, dtype: torch.dtype) -> KVCache:
        """As `Backend`."""
        return KVCache(specs, num_blocks, block_size, dtype)

    def run(self, forward: Forward, cache: KVCache, batch: ForwardBatch) -> torch.Tensor:
        """As `Backend`."""
        self._share_torch(forward, batch.input_ids.shape[1])
        context: Context = PagedAttention(cache, batch)
        # A step of partial chunks samples nothing; one row of logits is the least that the models compute.
        rows = batch.logits_rows if len(batch.logits_rows) else torch.zeros(1, dtype=torch.int64)
        count = batch.input_ids.shape[1]
        checked = cache.checked if isinstance(forward, FusedDecoder) else None
        with attend_with(context), adapters_of(batch.runs, count), known_after_once(checked, (count, len(rows))):
            return forward(fill_in(batch.input_ids, batch.chosen), batch.positions, rows)

    def warm_up(self, forward: Forward, specs: list[AttentionSpec], cache: KVCache, max_model_len: int) -> None:
        """The probe has run every kernel."""

    def sampler(self, eos_token_ids: list[int]) -> Sampler:
        """As `Backend`."""
        return Sampler(eos_token_ids)

    def serve(self) -> None:
        """As `Backend`."""

    def close(self) -> None:
        """As `Backend`."""


def backend_for(config: EngineConfig) -> Backend:
    """Where this worker computes; raises ModelError where that cannot be."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        if config.tensor_parallel_size > 1:
            raise ModelError("tensor_parallel_size is for CUDA devices; a CPU worker computes alone")
        if config.quantization == "int8" and not has_int8_dot():
            raise ModelError("quantization int8 needs a CPU with AVX512_VNNI")
        return CpuBackend(config)
    if not torch.cuda.is_available():
        raise ModelError("device cuda: torch finds no CUDA device here")
    if config.quantization != "none" and config.tensor_parallel_size > 1:
        raise ModelError(f"quantization {config.quantization} is for one device; split weights stay as they are")
    if config.tensor_parallel_size > torch.cuda.device_count():
        raise ModelError(f"tensor_parallel_size must be at most {torch.cuda.device_count()}, the CUDA devices here")
    from engine.gpu.backend import DeviceBackend  # Triton comes with torch's CUDA builds alone

    return DeviceBackend(config, torch.device("cuda"))
