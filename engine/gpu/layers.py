"""The small operations of a decoder layer as Triton kernels: each reads what a step has to read, and writes its result, once.

Sums, residuals and rotations are float32; only what is written is rounded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

HEADS = 8
"""Heads of a token that one program rotates."""
COLUMNS = 1024
"""Outputs of a token that one program gates."""
LEAST_WIDTH = 128
"""Numbers of a row that four warps share out. Of fewer, some warps would get copies, and could read a residual that another has written."""


@triton.jit
def _add_norm(
    residual, added, weight, out, epsilon, width, residual_row, added_row, out_row,
    WIDTH: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    ok = i < width
    x = tl.load(added + row * added_row + i, mask=ok, other=0.0).to(tl.float32)
    if not FIRST:
        x += tl.load(residual + row * residual_row + i, mask=ok, other=0.0)
    tl.store(residual + row * residual_row + i, x, mask=ok)
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + epsilon)
    normed = x * scale * tl.load(weight + i, mask=ok, other=0.0)
    tl.store(out + row * out_row + i, normed, mask=ok)


def add_norm(
    residual: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor, first: bool
) -> None:
    """Residual [T, H] float32 += added [T, H], or = added if `first`; out [T, H] = its RMS norm with weight [H] float32."""
    rows, width = residual.shape
    _add_norm[(rows,)](
        residual, added, weight, out, epsilon, width, residual.stride(0), added.stride(0), out.stride(0),
        WIDTH=max(LEAST_WIDTH, triton.next_power_of_2(width)), FIRST=first, num_warps=4 if width <= 4096 else 8,
    )  # fmt: skip


@triton.jit
def _rotate(
    qkv, cosines, sines, query_norm, key_norm, slots, keys, values, epsilon, row_stride, table_row, key_slot, value_slot,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, HALF_PADDED: tl.constexpr, HEADS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):  # fmt: skip
    """Some heads of one token. A thread writes just the places that it has read."""
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = DIM // 2
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, HALF_PADDED)
    is_value = head >= QUERIES + KEYS
    is_query = head < QUERIES
    ok = (head < QUERIES + 2 * KEYS)[:, None] & (d < half)[None, :]
    at = qkv + token * row_stride + head[:, None] * DIM + d[None, :]
    first = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=ok, other=0.0).to(tl.float32)
    slot = tl.load(slots + token)
    value_at = values + slot * value_slot + (head - QUERIES - KEYS)[:, None] * DIM + d[None, :]
    tl.store(value_at, first, mask=ok & is_value[:, None])
    tl.store(value_at + half, second, mask=ok & is_value[:, None])
    if HAS_NORMS:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM + epsilon)[:, None]
        in_half = (d < half)[None, :]
        of_query, of_key = query_norm + d[None, :], key_norm + d[None, :]
        choose = is_query[:, None]
        first *= scale * tl.where(
            choose, tl.load(of_query, mask=in_half, other=0.0), tl.load(of_key, mask=in_half, other=0.0)
        )
        of_query += half
        of_key += half
        second *= scale * tl.where(
            choose, tl.load(of_query, mask=in_half, other=0.0), tl.load(of_key, mask=in_half, other=0.0)
        )
    table = token * table_row + d
    in_table = d < half
    turned = first * tl.load(cosines + table, mask=in_table, other=0.0)[None, :]
    turned -= second * tl.load(sines + table, mask=in_table, other=0.0)[None, :]
    turned_second = second * tl.load(cosines + table + half, mask=in_table, other=0.0)[None, :]
    turned_second += first * tl.load(sines + table + half, mask=in_table, other=0.0)[None, :]
    of_query_ok = ok & is_query[:, None]
    tl.store(at, turned, mask=of_query_ok)
    tl.store(at + half, turned_second, mask=of_query_ok)
    of_key_ok = ok & (is_query[:, None] == 0) & (is_value[:, None] == 0)
    key_at = keys + slot * key_slot + (head - QUERIES)[:, None] * DIM + d[None, :]
    tl.store(key_at, turned, mask=of_key_ok)
    tl.store(key_at + half, turned_second, mask=of_key_ok)


def rotate_and_store(
    qkv: torch.Tensor,
    heads: tuple[int, int],
    cosines: torch.Tensor,
    sines: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Rotate the queries of qkv [T, (H + 2 HK) D] in place, and write its rotated keys and its values to the slots [T] int64 of a
    cache, [blocks, block size, HK, D] each.

    `heads`: H, HK. Cosines and sines are [T, D] float32. With `norms`, weights [D] for queries and for keys and an epsilon, each
    head is normed before. The rotation is that of Llama: numbers D/2 apart make a pair.
    """
    queries, kv = heads
    dim = keys.shape[3]
    query_norm, key_norm, epsilon = norms or (cosines, cosines, 0.0)
    _rotate[(qkv.shape[0], triton.cdiv(queries + 2 * kv, HEADS))](
        qkv, cosines, sines, query_norm, key_norm, slots, keys, values, epsilon,
        qkv.stride(0), cosines.stride(0), keys.stride(1), values.stride(1),
        QUERIES=queries, KEYS=kv, DIM=dim, HALF_PADDED=triton.next_power_of_2(dim // 2), HEADS=HEADS,
        HAS_NORMS=norms is not None, num_warps=4 if dim > 64 else 2,
    )  # fmt: skip


@triton.jit
def _gate(both, out, width, both_row, out_row, COLUMNS: tl.constexpr):
    """Some outputs of one row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    ok = i < width
    gate = tl.load(both + row * both_row + i, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(both + row * both_row + width + i, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + i, gate / (1 + tl.exp(-gate)) * up, mask=ok)


def gated(both: torch.Tensor) -> torch.Tensor:
    """[T, 2 I], gate and up beside each other -> silu(gate) * up [T, I]."""
    rows, width = both.shape[0], both.shape[1] // 2
    out = both.new_empty(rows, width)
    _gate[(rows, triton.cdiv(width, COLUMNS))](both, out, width, both.stride(0), out.stride(0), COLUMNS=COLUMNS)
    return out
