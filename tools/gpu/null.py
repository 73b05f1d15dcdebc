"""A device that computes nothing, over CPU tensors: what is left of a step is the host's part.

The model is loaded and proven in Triton's interpreter first; set TRITON_INTERPRET=1 before Triton is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.gpu.backend import DeviceBackend
from engine.gpu.graphs import DecodeGraphs

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.backend import Forward
    from engine.batch import ForwardBatch
    from engine.gpu.attention import DeviceKVCache
    from engine.shapes import AttentionSpec

VOCAB = 400


class NullGraphs(DecodeGraphs):
    """Graphs whose replay does nothing; their logits stay what they are."""

    def _record(self, size: int, splits: int, adapted: bool) -> tuple[Callable[[], None], torch.Tensor]:
        return (lambda: None), torch.zeros(size, VOCAB)


class NullBackend(DeviceBackend):
    """A device's backend whose steps return at once, for models of VOCAB tokens."""

    def warm_up(self, forward: Forward, specs: list[AttentionSpec], cache: DeviceKVCache, max_model_len: int) -> None:
        """Graphs as on a device."""
        self._graphs = NullGraphs(
            forward, specs, cache, self._config.max_num_seqs, max_model_len, self.device, self._slots, self._layers
        )
        self._graphs.capture()

    def _compute(self, forward: Forward, cache: DeviceKVCache, batch: ForwardBatch) -> torch.Tensor:
        if self._graphs is None:
            return super()._compute(forward, cache, batch)
        if self._graphs.fits(batch):
            return self._graphs.run(batch)
        return torch.zeros(max(1, len(batch.logits_rows)), VOCAB)
