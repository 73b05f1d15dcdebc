"""Products with int8 weights on the device, with one scale per output channel.

A step of some rows widens the weights inside the product. A step of many rows, which is bound by arithmetic, widens the whole weight first
and uses torch's product.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.gpu import products

MANY_ROWS = 512
"""From this many rows on, widening the whole weight (five bytes moved per element) is cheap compared to the product."""


def product(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """X [..., in] times the transpose of weight [out, in] int8 and scales [out] float32, plus bias [out], in the type
    of x.
    """
    out_features, in_features = weight.shape
    flat = x.reshape(-1, in_features)
    if flat.shape[0] >= MANY_ROWS:
        return F.linear(x, weight * scales.to(x.dtype)[:, None], bias)
    return products.product(flat, weight, scales, bias).view(*x.shape[:-1], out_features)
