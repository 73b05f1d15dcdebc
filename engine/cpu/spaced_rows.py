"""Rows of activations whose distance in memory suits the caches. It knows nothing of what is computed with them."""

from __future__ import annotations

import torch

from engine.cpu.kernels.emit import LINE_BYTES


def spaced_rows(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros [rows, width] whose rows lie an odd number of cache lines apart, so that those of a tile do not meet in the
    same places of the cache.
    """
    lines = -(-width * dtype.itemsize // LINE_BYTES) | 1
    return torch.zeros(rows, lines * LINE_BYTES // dtype.itemsize, dtype=dtype)[:, :width]
