"""Checks of a step's tensors on any device: attention calls match their recorded shapes, and slots and blocks are
within the cache. Further checks for a device's kernels are made by that device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


class ShapeError(ValueError):
    """Tensors do not fit together; raised before anything is read or written."""


def require(holds: bool, what: str, *tensors: torch.Tensor | None) -> None:
    """Raise ShapeError with `what` was expected and the shapes of `tensors`, unless `holds`."""
    if not holds:
        given = ", ".join(
            "none" if tensor is None else f"{list(tensor.shape)} {tensor.dtype} by {list(tensor.stride())}"
            for tensor in tensors
        )
        raise ShapeError(f"{what}: {given}" if given else what)


def check_slots(slots: torch.Tensor, count: int) -> None:
    """Raise ShapeError unless `slots` is [T] int64 and every slot is one of the cache's `count`."""
    require(slots.dtype == torch.int64 and slots.dim() == 1 and slots.is_contiguous(), "slots must be [T] int64", slots)
    if len(slots):
        lowest, highest = torch.aminmax(slots)
        require(int(lowest) >= 0 and int(highest) < count, f"a slot lies outside of the {count} that the cache has")


def check_tables(
    row: int, count: int, length: int, blocks: Sequence[int], rows: int, block_size: int, num_blocks: int
) -> None:
    """Raise ShapeError unless a sequence's rows are within the step, its tokens within its blocks, and those within the
    cache.
    """
    require(
        row >= 0 and 0 < count <= length and row + count <= rows,
        f"a sequence of {count} new tokens at row {row}, {length} in all, does not fit a step of {rows} rows",
    )
    require(
        length <= len(blocks) * block_size and min(blocks) >= 0 and max(blocks) < num_blocks,
        f"a sequence of {length} tokens does not fit its {len(blocks)} blocks, or one is not of the cache's {num_blocks}",
    )


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer as recorded: query and KV heads, widths of key and value, scale, the window of its mask in
    tokens (None: no window), and whether its softmax is plain (without soft-cap or sinks).
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float | None
    window: int | None
    plain: bool

    def check(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: int) -> None:
        """Raise ShapeError unless a call's query [H, T, D], key [HK, T, D] and value [HK, T, DV] have this layer's
        shapes for `rows` rows.
        """
        if (
            query.shape != (self.num_heads, rows, self.key_dim)
            or key.shape != (self.num_kv_heads, rows, self.key_dim)
            or value.shape != (self.num_kv_heads, rows, self.value_dim)
        ):
            raise ShapeError(
                f"layer {layer} called attention with query, key and value of {_shapes(query, key, value)} in a step of "
                f"{rows} rows; it was recorded with {self.num_heads} heads over {self.num_kv_heads}, of "
                f"{self.key_dim} and {self.value_dim} numbers"
            )


def _shapes(*tensors: torch.Tensor) -> str:
    return ", ".join("x".join(map(str, tensor.shape)) for tensor in tensors)


def spec_of(specs: Sequence[AttentionSpec], layer: int) -> AttentionSpec:
    """The spec of layer `layer`; raises ShapeError for an unknown layer."""
    if not 0 <= layer < len(specs):
        raise ShapeError(f"attention was called by layer {layer}, of {len(specs)}")
    return specs[layer]
