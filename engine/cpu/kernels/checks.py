"""Bounds and shape checks before addresses go to compiled code, which checks nothing itself.

Shapes and types are checked at each call; the contents of slots, block tables and adapter segments once per step. If all
calls of a forward pass are determined by its number of rows, its shapes are checked once per number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.cpu.kernels.coded import CODES, GROUP_INPUTS, CodedWeight, panel_bytes
from engine.cpu.kernels.emit import LANES
from engine.cpu.kernels.lora import FIELDS, RANKS
from engine.cpu.kernels.tiles import ADD, GATE, PANEL, WIDEN
from engine.shapes import require

MOST_SIGNATURES = 4096
"""Signatures that are remembered; then it begins anew."""

_known = False


@contextmanager
def known_after_once(passed: set[tuple[int, ...]] | None, signature: tuple[int, ...]) -> Iterator[None]:
    """Skip shape and type checks in the block if a block with this signature is in `passed`; None: never skip.

    Use it only for code whose calls are all determined by the signature. These checks took a tenth of a step of few
    rows.
    """
    global _known
    if passed is None:
        yield
        return
    _known = signature in passed
    try:
        yield
    finally:
        _known = False
    if len(passed) >= MOST_SIGNATURES:
        passed.clear()
    passed.add(signature)


def known() -> bool:
    """Whether this call's shapes have been checked before."""
    return _known


def check_norm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Require rows x [T, H] and weight [H] float32, out [T, at least H]."""
    if _known:
        return
    rows, width = x.shape
    require(
        x.dtype == weight.dtype == torch.float32
        and x.stride(1) == weight.stride(0) == out.stride(1) == 1
        and weight.shape == (width,)
        and out.shape[0] == rows
        and out.shape[1] >= width,
        "a norm takes [T, H] and [H] float32 and gives [T, H]",
        x,
        weight,
        out,
    )


def check_rotary(
    heads: torch.Tensor,
    count: int,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
) -> None:
    """Require rows of at least `count` heads, cosines and sines [T, D] float32, norms [D] float32."""
    if _known:
        return
    rows, dim = cosines.shape
    require(
        cosines.dtype == sines.dtype == torch.float32
        and cosines.is_contiguous()
        and sines.is_contiguous()
        and sines.shape == (rows, dim)
        and dim % 2 == 0
        and heads.shape[0] == rows
        and heads.shape[1] >= count * dim
        and heads.stride(1) == 1,
        "rotary embedding takes heads [T, *], and cosines and sines [T, D] float32",
        heads,
        cosines,
        sines,
    )
    for weight in () if norms is None else norms[:2]:
        require(
            weight.shape == (dim,) and weight.dtype == torch.float32 and weight.is_contiguous(),
            "the norm of a head must be [D] float32",
            weight,
        )


def check_packed(weight: torch.Tensor, dtype: torch.dtype, paired: int) -> None:
    """A weight in panels, [panels, in, 32] or in pairs [panels, in / 2, 32, 2], of the type that it is
    multiplied in.
    """
    if _known:
        return
    require(
        weight.dtype == dtype
        and weight.dim() == 3 + paired
        and weight.shape[2] == PANEL
        and (not paired or weight.shape[3] == 2)
        and weight.is_contiguous(),
        "a weight must be packed for the type that it is multiplied in",
        weight,
    )


def check_coded(weight: CodedWeight, dtype: torch.dtype) -> None:
    """A weight of bfloat16 that has all of its panels, whose tables are loaded whole."""
    if _known:
        return
    require(
        dtype == torch.bfloat16
        and weight.inner % GROUP_INPUTS == 0
        and weight.packed.dtype == torch.uint8
        and weight.packed.is_contiguous()
        and weight.packed.data_ptr() % CODES == 0
        and weight.packed.numel() >= weight.panels * panel_bytes(weight.inner),
        "a coded weight must have all of its panels",
        weight.packed,
    )


def check_product(
    x: torch.Tensor, inner: int, panels: int, bias: torch.Tensor | None, out: torch.Tensor, ending: int
) -> None:
    """Rows of x are as long as the weight's, rows of `out` have room for whole panels and hold what the
    ending writes.
    """
    if _known:
        return
    width = panels * (LANES if ending == GATE else PANEL)
    dtype = torch.float32 if ending in (ADD, WIDEN) else x.dtype
    require(
        x.shape[1] == inner
        and x.stride(1) == out.stride(1) == 1
        and out.dtype == dtype
        and out.shape[0] >= x.shape[0]
        and out.shape[1] >= width,
        "a product takes rows as long as the weight's, and stores whole panels",
        x,
        out,
    )
    require(
        bias is None or (bias.dtype == torch.float32 and bias.numel() >= panels * PANEL and bias.is_contiguous()),
        "a bias must be [panels * 32] float32",
        bias,
    )


def check_segments(segments: torch.Tensor, ranks: int, factors: torch.Tensor | None, rows: int) -> None:
    """Runs [N, FIELDS] int64, at least one, that cover all rows once, in order, none of more than `ranks`."""
    require(
        segments.dtype == torch.int64
        and segments.is_contiguous()
        and segments.dim() == 2
        and segments.shape[1] == FIELDS
        and len(segments) > 0,
        f"segments must be [N, {FIELDS}] int64",
        segments,
    )
    table = segments.numpy()
    first, count, sizes = table[:, 0], table[:, 1], table[:, RANKS]
    end = count.cumsum()
    require(bool((first == end - count).all() and count.min() > 0), "segments that leave out rows", segments)
    require(bool(sizes.min() >= 0 and sizes.max() <= ranks), f"segments of more than {ranks} ranks", segments)
    require(end[-1] == rows, f"segments of {end[-1]} rows in a step of {rows}")
    require(factors is None or (factors.shape == (rows,) and factors.dtype == torch.int64), "factors", factors)


def check_new_keys(
    key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Key [HK, T, D] and value [HK, T, DV] have a slot for each row, and the cache is one of such heads."""
    if _known:
        return
    heads, rows, dim = key.shape
    require(
        slots.shape == (rows,)
        and slots.dtype == torch.int64
        and value.shape[:2] == (heads, rows)
        and keys.shape[1:3] == (heads, dim)
        and values.shape[:2] == keys.shape[:2]
        and values.shape[2] <= keys.shape[3]
        and value.shape[2] <= values.shape[3]
        and keys.dtype == values.dtype
        and keys.is_contiguous()
        and values.is_contiguous(),
        "new keys and values do not fit their slots or the cache",
        key,
        value,
        slots,
        keys,
        values,
    )


def check_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    cache: tuple[int, int, int],
) -> None:
    """Query [H, T, D] and out [T, H, DV] fit a cache of (blocks, block size, lanes), sinks are [H]."""
    if _known:
        return
    heads, rows, dim = query.shape
    blocks, size, lanes = cache
    kv_heads = keys.shape[1]
    require(
        heads % kv_heads == 0
        and out.dtype == keys.dtype == values.dtype
        and keys.shape == (blocks, kv_heads, dim, lanes)
        and values.shape[:3] == (blocks, kv_heads, size)
        and out.shape[:2] == (rows, heads)
        and out.shape[2] <= values.shape[3]
        and out.stride(2) == 1
        and keys.is_contiguous()
        and values.is_contiguous()
        and (sinks is None or sinks.shape == (heads,)),
        "queries do not fit the cache",
        query,
        keys,
        values,
        out,
        sinks,
    )
