"""What a device is to the engine: the cache, the layers, how a step runs and where tokens are chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

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
"""Makes a way to run the model, and the layers that adapters may be put into."""


class Backend(Protocol):
    """Where a model computes."""

    device: torch.device
    quantization: Quantization | None
    """How the layers' weights are kept; None: as they are."""
    computes_drafts: bool
    """Whether draft tokens beside a decode step cost less here than they save."""

    def default_dtype(self) -> torch.dtype:
        """What "auto" stands for."""
        ...

    def rounding(self, forward: Forward) -> str | None:
        """Why a sequence's numbers may be rounded otherwise in another batch; None: they are the same, to the bit."""
        ...

    def pretrained_options(self) -> dict[str, Any]:
        """Arguments of `from_pretrained` beside the directory and the dtype."""
        ...

    def candidates(self, model: PreTrainedModel, specs: list[AttentionSpec]) -> list[Candidate]:
        """Ways to run the model, fastest first; one raises ValueError or AttributeError where it cannot."""
        ...

    def num_blocks(self, specs: list[AttentionSpec], dtype: torch.dtype, limit: int) -> int:
        """How many blocks of KV cache there is room for, `limit` at most."""
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
