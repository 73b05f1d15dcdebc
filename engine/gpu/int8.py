"""Linear layers whose weights stay in bytes on the device: half of what a decode step reads, at the same activations.

One scale per output channel. A Triton kernel widens the weights on the way into the product; a step of many rows, which
is bound by arithmetic, widens them first and leaves the product to torch. It takes no adapters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import nn
from transformers.pytorch_utils import Conv1D

MANY_ROWS = 512
"""From so many rows on, what widening costs (five bytes moved for each weight) is little beside the product."""
MOST_TILE_ROWS = 64
TURN = 128
"""Inputs of one turn of the inner loop."""
WIDE = 8192
"""From so many output channels on there are tiles enough of twice the width."""


@triton.jit
def _product(
    x, weight, scales, bias, out, rows, columns, inner, x_row, weight_row, out_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TURN: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One tile of the rows of x times one tile of the weight's output channels."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column_ok, row_ok = column < columns, row < rows
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, inner, TURN):
        i = begin + tl.arange(0, TURN)
        given = tl.load(x + row[:, None] * x_row + i[None, :], mask=row_ok[:, None] & (i < inner)[None, :], other=0.0)
        byte = tl.load(
            weight + column[None, :].to(tl.int64) * weight_row + i[:, None],
            mask=column_ok[None, :] & (i < inner)[:, None], other=0,
        )  # fmt: skip
        sums += tl.dot(given, byte.to(tl.float32).to(given.dtype), input_precision="ieee")
    result = sums * tl.load(scales + column, mask=column_ok, other=0.0)[None, :]
    if HAS_BIAS:
        result += tl.load(bias + column, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    tl.store(out + row[:, None] * out_row + column[None, :], result, mask=row_ok[:, None] & column_ok[None, :])


class ByteLinear(nn.Module):
    """y = x W^T + b, W [out, in] in signed bytes times a float32 scale per row of W."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        wide = weight.detach().float()
        self.scales = wide.abs().amax(1).clamp_min(1e-30) / 127
        self.bytes = (wide / self.scales[:, None]).round().to(torch.int8).contiguous()
        self.bias = None if bias is None else bias.detach().to(weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], in the type of x."""
        flat = x.reshape(-1, self.in_features)
        rows = flat.shape[0]
        if rows >= MANY_ROWS:
            return F.linear(x, self.bytes * self.scales.to(x.dtype)[:, None], self.bias)
        out = flat.new_empty(rows, self.out_features)
        columns = 16 if self.out_features < WIDE else 32
        tile = min(MOST_TILE_ROWS, max(16, triton.next_power_of_2(rows)))
        _product[(triton.cdiv(self.out_features, columns), triton.cdiv(rows, tile))](
            flat, self.bytes, self.scales, self.bias if self.bias is not None else self.scales, out,
            rows, self.out_features, self.in_features, flat.stride(0), self.bytes.stride(0), out.stride(0),
            ROWS=tile, COLUMNS=columns, TURN=TURN, HAS_BIAS=self.bias is not None,
        )  # fmt: skip
        return out.view(*x.shape[:-1], self.out_features)


def quantise(model: nn.Module, head: nn.Module | None, device: torch.device) -> None:
    """Replace every `nn.Linear` and `Conv1D` but the output layer, one by one, so that the device never holds all of the
    weights at their full width.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in (nn.Linear, Conv1D) and child is not head:
                weight = child.weight.t() if type(child) is Conv1D else child.weight
                setattr(parent, name, ByteLinear(weight.to(device), child.bias))
