"""The interface of a device to the engine: KV cache, layers, forward pass and sampler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from engine.models.files import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from engine.adapters.slots import AdapterLayer
    from engine.batch import ForwardBatch
    from engine.quantization.base import Quantization
    from engine.sampling.sampler import Sampler
    from engine.shapes import AttentionSpec

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""ids [1, T], positions [1, T], rows [L] -> logits [L, V], with attention in the current context."""
Candidate = Callable[[], "tuple[Forward, list[AdapterLayer]]"]
"""Builds a forward function of the model, and returns it with the layers that take adapters."""


def blocks_within(cache_bytes: int, bytes_per_block: int) -> int:
    """The blocks of a KV cache of the configured size. Raises ModelError if they hold no sequence: one of them is for padding."""
    if cache_bytes < 2 * bytes_per_block:
        raise ModelError(
            f"kv_cache_bytes must be at least {2 * bytes_per_block} for this model, two blocks of its cache, got {cache_bytes}"
        )
    return cache_bytes // bytes_per_block


class Backend(Protocol):
    """A device that runs a model."""

    device: torch.device
    quantization: Quantization | None
    """The quantization of the layers' weights; None: they stay as loaded."""
    computes_drafts: bool
    """Whether drafts pay on this device: verifying them costs less than they save."""

    def default_dtype(self) -> torch.dtype:
        """The type of the weights for dtype "auto"."""
        ...

    def rounding(self, forward: Forward) -> str | None:
        """Why results are not batch-invariant (bitwise equal in any batch); None if they are."""
        ...

    def pretrained_options(self) -> dict[str, Any]:
        """Further arguments of `from_pretrained`, besides the directory and the dtype."""
        ...

    def candidates(self, model: PreTrainedModel, specs: list[AttentionSpec]) -> list[Candidate]:
        """Forward functions to try, fastest first. A candidate raises ValueError or AttributeError if it does not
        support the model.
        """
        ...

    def num_blocks(self, specs: list[AttentionSpec], dtype: torch.dtype, limit: int) -> int:
        """The number of KV cache blocks that fit into memory, one of them for padding, at most `limit` besides. Raises ModelError."""
        ...

    def new_cache(self, specs: list[AttentionSpec], num_blocks: int, block_size: int, dtype: torch.dtype) -> Any:
        """Allocate a KV cache."""
        ...

    def run(self, forward: Forward, cache: Any, batch: ForwardBatch) -> torch.Tensor:
        """Compute one step; returns its logits [L, V]."""
        ...

    def warm_up(self, forward: Forward, specs: list[AttentionSpec], cache: Any, max_model_len: int) -> None:
        """Prepare the device (capture graphs, compile kernels), so that the first steps are as fast as later ones."""
        ...

    def sampler(self, eos_token_ids: list[int]) -> Sampler:
        """A sampler for this backend's logits."""
        ...

    def serve(self) -> None:
        """Called once, when loading and warm-up are done."""
        ...

    def close(self) -> None:
        """Stop the processes and threads that the backend started."""
        ...
