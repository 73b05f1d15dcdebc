"""Products with int8 weights on the device, with one scale per output channel.

A Triton kernel widens the weights inside the product. A step of many rows, which is bound by arithmetic, widens the
whole weight first and uses torch's product.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

MANY_ROWS = 512
"""From this many rows on, widening the whole weight (five bytes moved per element) is cheap compared to the product."""
MAX_TILE_ROWS = 64
TURN = 128
"""Inputs per iteration of the inner loop."""
WIDE = 8192
"""From this many output channels on, tiles of twice the width are numerous enough."""


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


def product(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """X [..., in] times the transpose of weight [out, in] int8 and scales [out] float32, plus bias [out], in the type
    of x.
    """
    out_features, in_features = weight.shape
    flat = x.reshape(-1, in_features)
    rows = flat.shape[0]
    if rows >= MANY_ROWS:
        return F.linear(x, weight * scales.to(x.dtype)[:, None], bias)
    out = flat.new_empty(rows, out_features)
    columns = 16 if out_features < WIDE else 32
    tile = min(MAX_TILE_ROWS, max(16, triton.next_power_of_2(rows)))
    _product[(triton.cdiv(out_features, columns), triton.cdiv(rows, tile))](
        flat, weight, scales, bias if bias is not None else scales, out,
        rows, out_features, in_features, flat.stride(0), weight.stride(0), out.stride(0),
        ROWS=tile, COLUMNS=columns, TURN=TURN, HAS_BIAS=bias is not None,
    )  # fmt: skip
    return out.view(*x.shape[:-1], out_features)
