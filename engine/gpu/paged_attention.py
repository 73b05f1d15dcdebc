"""Ragged attention over a paged KV cache as one Triton kernel, for prefill chunks and decode alike.

Runs on CUDA. With TRITON_INTERPRET=1 set before Triton is imported it runs on CPU tensors, which tests use on machines
without a device. Online softmax as in FlashAttention-2 (arXiv 2307.08691). Long contexts are split at fixed positions,
so that a sequence's result depends on the rest of the batch only by whether the batch contains long prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.runtime import driver

DECODE_ROWS = 16
"""Rows of a tile of single queries: the fewest that the matrix units support."""
PREFILL_ROWS = 64
TURNS = ((64, 3), (32, 3), (16, 3), (16, 1))
"""Keys per iteration of the inner loop, and Triton's stages of its loads: the first that fits into a device's shared memory is taken."""
NARROW, NARROW_STAGES = 64, 2
"""Heads up to this width take fewer stages ([measured](docs/benchmarks.md#on-a-gpu))."""
OVERHEAD_BYTES = 2048
"""Shared memory that the kernel takes besides its tiles."""
AT_ONCE = 16
"""Pieces that are put together in one turn."""
LOG2_E = tl.constexpr(1.4426950408889634)
SPLIT_KEYS, MOST_SPLITS = 256, 128
"""Decode over longer contexts is split into pieces of this many keys, or of more where the longest sequence would have more pieces."""


@triton.jit
def _turn(
    q, keys, values, table, begin, position, length, scale, softcap, window,
    key_block, key_slot, key_head, value_block, value_slot, value_head, highest, total, sums,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    BLOCK: tl.constexpr, TURN: tl.constexpr, MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Add some keys to the highest score of each row, to its sum of weights, and to its weighted values. Scores are logarithms to base 2."""
    d = tl.arange(0, DIM_PADDED)
    dv = tl.arange(0, VALUE_PADDED)
    n = begin + tl.arange(0, TURN)
    if MASKED:
        seen = n < length
        block = tl.load(table + n // BLOCK, mask=seen, other=0).to(tl.int64)
    else:
        block = tl.load(table + n // BLOCK).to(tl.int64)
    key_at = keys + key_head + (block * key_block + (n % BLOCK) * key_slot)[None, :] + d[:, None]
    value_at = values + value_head + (block * value_block + (n % BLOCK) * value_slot)[:, None] + dv[None, :]
    if MASKED:
        k = tl.load(key_at, mask=seen[None, :] & (d < DIM)[:, None], other=0.0)
        v = tl.load(value_at, mask=seen[:, None] & (dv < VALUE_DIM)[None, :], other=0.0)
    else:
        k = tl.load(key_at) if DIM == DIM_PADDED else tl.load(key_at, mask=(d < DIM)[:, None], other=0.0)
        v = (
            tl.load(value_at)
            if VALUE_DIM == VALUE_PADDED
            else tl.load(value_at, mask=(dv < VALUE_DIM)[None, :], other=0.0)
        )
    scores = tl.dot(q, k, input_precision="ieee") * scale
    if HAS_SOFTCAP:
        scores = softcap * LOG2_E * (2 / (1 + tl.exp(-2 * scores / softcap)) - 1)
    if MASKED:
        keep = (n[None, :] <= position[:, None]) & seen[None, :]
        if HAS_WINDOW:
            keep = keep & (n[None, :] > position[:, None] - window)
        scores = tl.where(keep, scores, float("-inf"))
    highest_now = tl.maximum(highest, tl.max(scores, 1))
    safe = tl.where(highest_now == float("-inf"), 0.0, highest_now)
    shrink = tl.exp2(highest - safe)
    weights = tl.exp2(scores - safe[:, None])
    total = total * shrink + tl.sum(weights, 1)
    sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None], input_precision="ieee")
    return highest_now, total, sums


@triton.jit(do_not_specialize=["table_row", "logsum_token", "logsum_head"])  # they change with the contexts
def _attention(
    query, keys, values, out, logsums, tile_sequence, tile_start, query_starts, lengths, tables, sinks,
    scale, softcap, window,
    query_token, query_head, key_block, key_slot, key_head, value_block, value_slot, value_head,
    out_token, out_head, logsum_token, logsum_head, table_row,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TURN: tl.constexpr, SPLIT: tl.constexpr,
    SPLIT_UP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """One tile of rows (query * GROUP + head of the group), one KV head, one piece of the context."""
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(tile_sequence + tile)
    if sequence < 0:  # padding of a captured graph
        return
    start = tl.load(tile_start + tile)
    first = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - first
    length = tl.load(lengths + sequence)
    rows = tl.arange(0, ROWS)
    index = start + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    row_ok = (index < count) & (rows < ROWS // GROUP * GROUP)
    position = length - count + index
    last = tl.minimum(start + ROWS // GROUP - 1, count - 1) + length - count
    low = split * SPLIT
    if HAS_WINDOW:
        low = tl.maximum(low, tl.maximum(length - count + start - window + 1, 0) // TURN * TURN)
    high = last + 1
    if SPLIT_UP:
        high = tl.minimum(high, (split + 1) * SPLIT)
        if low >= high:  # the context has no such piece; its part is never read
            none = tl.full([ROWS], float("-inf"), tl.float32)
            tl.store(logsums + (first + index) * logsum_token + head * logsum_head + split, none, mask=row_ok)
            return
    d = tl.arange(0, DIM_PADDED)
    dv = tl.arange(0, VALUE_PADDED)
    q = tl.load(
        query + (first + index)[:, None] * query_token + head[:, None] * query_head + d[None, :],
        mask=row_ok[:, None] & (d < DIM)[None, :], other=0.0,
    )  # fmt: skip
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
    masked = low
    if not HAS_WINDOW:  # every row sees the keys before these
        masked += tl.maximum(tl.minimum(length - count + start + 1, high) - low, 0) // TURN * TURN
        for begin in range(low, masked, TURN):
            highest, total, sums = _turn(
                q, keys, values, tables + sequence * table_row, begin, position, length, scale, softcap, window,
                key_block, key_slot, kv_head * key_head, value_block, value_slot, kv_head * value_head, highest, total, sums,
                DIM, DIM_PADDED, VALUE_DIM, VALUE_PADDED, BLOCK, TURN, False, False, HAS_SOFTCAP,
            )  # fmt: skip
    for begin in range(masked, high, TURN):
        highest, total, sums = _turn(
            q, keys, values, tables + sequence * table_row, begin, position, length, scale, softcap, window,
            key_block, key_slot, kv_head * key_head, value_block, value_slot, kv_head * value_head, highest, total, sums,
            DIM, DIM_PADDED, VALUE_DIM, VALUE_PADDED, BLOCK, TURN, True, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
    out_ok = row_ok[:, None] & (dv < VALUE_DIM)[None, :]
    out_at = out + (first + index)[:, None] * out_token + head[:, None] * out_head + dv[None, :]
    if not SPLIT_UP:
        if HAS_SINKS:  # a sink acts as one more key with a weight and no value
            sink = tl.load(sinks + head, mask=row_ok, other=0.0).to(tl.float32) * LOG2_E
            with_sink = tl.maximum(highest, sink)
            shrink = tl.exp2(highest - with_sink)
            total = total * shrink + tl.exp2(sink - with_sink)
            sums = sums * shrink[:, None]
        total = tl.where(total == 0, 1.0, total)  # rows that are padding
        tl.store(out_at, sums / total[:, None], mask=out_ok)
    else:  # a part; `_combine` puts the parts together
        safe_total = tl.where(total == 0, 1.0, total)
        tl.store(out_at + split * VALUE_DIM, sums / safe_total[:, None], mask=out_ok)
        logsum = tl.where(total == 0, float("-inf"), (highest + tl.log2(safe_total)) / LOG2_E)
        tl.store(logsums + (first + index) * logsum_token + head * logsum_head + split, logsum, mask=row_ok)


@dataclass(slots=True)
class Plan:
    """The attention tiles of one step, all int32 on the device; shared by all layers of one group size.

    tile_sequence, tile_start: [tiles], sequence (-1: none) and first query of each tile of `rows` rows.
    query_starts: [sequences + 1]. lengths: [sequences], context and new tokens. tables: [sequences, blocks].
    """

    tile_sequence: torch.Tensor
    tile_start: torch.Tensor
    rows: int
    query_starts: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    splits: int
    """The number of pieces of a context."""
    split_keys: int
    """Their length in keys."""


@cache
def shared_memory(device: torch.device) -> int | None:
    """The room of a kernel's tiles, in bytes of shared memory; None on the CPU, in Triton's interpreter."""
    if device.type != "cuda":
        return None
    properties = driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["max_shared_mem"])


def in_vectors(dtype: torch.dtype, room: int | None) -> bool:
    """Whether a device multiplies this type without its matrix units, so that large tiles do not fit into its registers: the
    compiler would take a minute for them, and spill most of their sums.
    """
    return dtype == torch.float32 and room is not None


def turn_of(dim: int, value_dim: int, dtype: torch.dtype, room: int | None) -> tuple[int, int]:
    """The entry of TURNS for padded dims of keys and values. It is the same for prefill and decode, so that both add up alike."""
    few = in_vectors(dtype, room)
    for keys, stages in TURNS[few:]:
        copies = max(1, stages - 1)  # keys and values of the next iterations are loaded ahead
        rows = DECODE_ROWS if few else PREFILL_ROWS
        tiles_bytes = (rows * dim + copies * keys * (dim + value_dim)) * dtype.itemsize
        if room is None or tiles_bytes + OVERHEAD_BYTES <= room:
            return keys, min(stages, NARROW_STAGES) if max(dim, value_dim) <= NARROW else stages
    return TURNS[-1]


def tile_rows(group: int, longest_chunk: int, dtype: torch.dtype, room: int | None) -> int:
    """Rows of a tile for chunks of up to `longest_chunk` queries of this type, each of which takes `group` rows."""
    least = DECODE_ROWS if longest_chunk == 1 or in_vectors(dtype, room) else PREFILL_ROWS
    power: int = triton.next_power_of_2(group)
    return max(least, power)


def keys_of_split(longest: int) -> int:
    """The length of a piece, in keys, in an engine whose longest sequence is `longest`."""
    return max(SPLIT_KEYS, -(-longest // MOST_SPLITS // 64) * 64)


def tiles(counts: list[int], group: int, rows: int) -> tuple[list[int], list[int]]:
    """The sequence and the first query of every tile."""
    step = rows // group
    sequence = [i for i, count in enumerate(counts) for _ in range(0, count, step)]
    start = [first for count in counts for first in range(0, count, step)]
    return sequence, start


@triton.jit(do_not_specialize=["splits", "logsum_token", "logsum_head"])
def _combine(
    parts, logsums, sinks, out, splits, part_token, part_head, logsum_token, logsum_head, out_token, out_head,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr, AT_ONCE: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """One query of one head: the pieces' results, weighted by their sums."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dv = tl.arange(0, VALUE_PADDED)
    highest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    sums = tl.zeros([VALUE_PADDED], tl.float32)
    for begin in range(0, splits, AT_ONCE):
        s = begin + tl.arange(0, AT_ONCE)
        logsum = tl.load(logsums + token * logsum_token + head * logsum_head + s, mask=s < splits, other=float("-inf"))
        part_ok = (logsum > float("-inf"))[:, None] & (dv < VALUE_DIM)[None, :]
        part_at = parts + token * part_token + head * part_head + s[:, None] * VALUE_DIM + dv[None, :]
        part = tl.load(part_at, mask=part_ok, other=0.0)
        highest_now = tl.maximum(highest, tl.max(logsum, 0))
        safe = tl.where(highest_now == float("-inf"), 0.0, highest_now)
        shrink = tl.exp(highest - safe)
        weights = tl.exp(logsum - safe)
        total = total * shrink + tl.sum(weights, 0)
        sums = sums * shrink + tl.sum(part * weights[:, None], 0)
        highest = highest_now
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        with_sink = tl.maximum(highest, sink)
        shrink = tl.exp(highest - with_sink)
        total = total * shrink + tl.exp(sink - with_sink)
        sums = sums * shrink
    total = tl.where(total == 0, 1.0, total)
    tl.store(out + token * out_token + head * out_head + dv, sums / total, mask=dv < VALUE_DIM)


@dataclass(frozen=True, slots=True)
class Parts:
    """The results of the pieces of contexts, float32: [T, H, splits, DV], and the logarithms of their sums [T, H, splits], -inf where
    there is no result. All layers of a step may use the same: padding rows never have one.
    """

    out: torch.Tensor
    logsums: torch.Tensor

    @classmethod
    def of(cls, tokens: int, heads: int, splits: int, value_dim: int, device: torch.device) -> Parts:
        """Without any result."""
        none = torch.full((tokens, heads, splits), -torch.inf, device=device)
        return cls(torch.empty(tokens, heads, splits, value_dim, device=device), none)


def attend(
    plan: Plan,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    parts: Parts | None,
) -> None:
    """Query [T, H, D] over keys [blocks, block size, HK, D] and values [blocks, block size, HK, DV] -> out [T, H, DV], but for
    padding rows.

    `scale` defaults to D ** -0.5; sinks are [H]; `parts` are those of a plan of several pieces.
    """
    _, heads, dim = query.shape
    block_size, kv_heads, value_dim = keys.shape[1], keys.shape[2], values.shape[3]
    dim_padded, value_padded = max(16, triton.next_power_of_2(dim)), max(16, triton.next_power_of_2(value_dim))
    turn, stages = turn_of(dim_padded, value_padded, query.dtype, shared_memory(query.device))
    # Whole contexts have no sums to keep: any tensor stands for them.
    results, logsums = (out, out) if parts is None else (parts.out, parts.logsums)
    _attention[(len(plan.tile_sequence), kv_heads, plan.splits)](
        query, keys, values, results, logsums, plan.tile_sequence, plan.tile_start, plan.query_starts, plan.lengths,
        plan.tables, query if sinks is None else sinks,
        (dim**-0.5 if scale is None else scale) * (1.0 if softcap else LOG2_E.value), softcap or 0.0, window or 0,
        query.stride(0), query.stride(1), *keys.stride()[:3], *values.stride()[:3],
        results.stride(0), results.stride(1), logsums.stride(0), logsums.stride(1), plan.tables.stride(0),
        GROUP=heads // kv_heads, DIM=dim, DIM_PADDED=dim_padded, VALUE_DIM=value_dim, VALUE_PADDED=value_padded,
        BLOCK=block_size, ROWS=plan.rows, TURN=turn,
        SPLIT=plan.split_keys, SPLIT_UP=parts is not None, HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None, num_stages=stages,
    )  # fmt: skip
    if parts is not None:
        _combine[(len(query), heads)](
            parts.out, parts.logsums, query if sinks is None else sinks, out, plan.splits,
            parts.out.stride(0), parts.out.stride(1), logsums.stride(0), logsums.stride(1), out.stride(0), out.stride(1),
            VALUE_DIM=value_dim, VALUE_PADDED=value_padded, AT_ONCE=AT_ONCE, HAS_SINKS=sinks is not None,
        )  # fmt: skip
