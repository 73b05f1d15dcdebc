"""Products with int8 weights on the device, with one scale per output channel.

A step of few rows widens the weights inside the product (engine/gpu/products.py). For more the whole weight is widened first, and torch multiplies.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from engine.gpu import products

INPUTS = 2048
"""Inputs of one output that a program widens."""


@triton.jit
def _widen(weight, scales, out, inner, INPUTS: tl.constexpr):
    """Some inputs of one output."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * INPUTS + tl.arange(0, INPUTS)
    numbers = tl.load(weight + row * inner + i, mask=i < inner, other=0).to(tl.float32)
    tl.store(out + row * inner + i, numbers * tl.load(scales + row), mask=i < inner)


def widened(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight [out, in] int8, without gaps, times scales [out] float32."""
    rows, inner = weight.shape
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    _widen[(rows, triton.cdiv(inner, INPUTS))](weight, scales, out, inner, INPUTS=INPUTS)
    return out


def product(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """X [..., in] times the transpose of weight [out, in] int8 and scales [out] float32, plus bias [out], in the type
    of x.
    """
    out_features, in_features = weight.shape
    flat = x.reshape(-1, in_features)
    if len(flat) > products.MOST_ROWS:
        return F.linear(x, widened(weight, scales, x.dtype), bias)
    return products.product(flat, weight, scales, bias).view(*x.shape[:-1], out_features)
