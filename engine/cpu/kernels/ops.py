"""The kernels as functions over torch tensors, whose shapes are checked before their addresses are
taken (checks.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine import shapes
from engine.cpu.kernels import attention, checks, layers, matmul, sampling
from engine.cpu.kernels.emit import BF16, F16, F32, LANES, has_bf16_dot
from engine.cpu.kernels.int8 import int8_kernel, quantise_kernel
from engine.cpu.kernels.lora import adapted_kernel, low_rank_kernel
from engine.cpu.kernels.threads import float_bits, num_threads, run
from engine.cpu.kernels.tiles import MAX_ROWS, PANEL, STORE

KINDS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}


def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor) -> None:
    """Out [T, H] = the RMS norm of x [T, H] float32, times weight [H] float32. Rows may lie further apart."""
    rows, width = x.shape
    checks.check_norm(x, weight, out)
    run(
        layers.norm_kernel(KINDS[out.dtype]),
        rows, width, x.data_ptr(), x.stride(0), weight.data_ptr(), float_bits(epsilon),
        out.data_ptr(), out.stride(0), work=rows * width, wakes=False,
    )  # fmt: skip


def rotate(
    heads: torch.Tensor,
    counts: tuple[int, int],
    cosines: torch.Tensor,
    sines: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
) -> None:
    """Norm (query weight, key weight [D] float32, epsilon) and rotate the first `counts` (query, key) heads of the
    rows [T, *] in place; cosines and sines [T, D] float32.
    """
    rows, dim = cosines.shape
    checks.check_rotary(heads, sum(counts), cosines, sines, norms)
    query_norm, key_norm, epsilon = (
        (0, 0, 0.0) if norms is None else (norms[0].data_ptr(), norms[1].data_ptr(), norms[2])
    )
    run(
        layers.rotary_kernel(KINDS[heads.dtype]),
        rows, heads.data_ptr(), heads.stride(0), *counts, dim, cosines.data_ptr(), sines.data_ptr(),
        query_norm, key_norm, float_bits(epsilon), work=rows * sum(counts) * dim, wakes=False,
    )  # fmt: skip


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2F], gate before up, contiguous -> silu(gate) * up [T, F]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    shapes.require(gate_up.is_contiguous() and gate_up.shape[1] % 2 == 0, "gate and up must be [T, 2F]", gate_up)
    out = gate_up.new_empty(rows, width)
    run(
        layers.silu_mul_kernel(KINDS[out.dtype]),
        rows, width, gate_up.data_ptr(), out.data_ptr(), work=2 * rows * width, wakes=False,
    )  # fmt: skip
    return out


def wide(columns: int) -> int:
    """`columns` rounded up to whole panels: the width that the output rows of a product need."""
    return -(-columns // PANEL) * PANEL


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] -> [panels, in, 32], the last panel filled up with zeros; bfloat16 in pairs where the CPU has dot
    products of them, and then `in` must be even.
    """
    columns, inner = weight.shape
    padded = weight.new_zeros(wide(columns), inner)
    padded[:columns] = weight
    if _paired(weight.dtype):
        return padded.view(-1, PANEL, inner // 2, 2).transpose(1, 2).contiguous()
    return padded.view(-1, PANEL, inner).transpose(1, 2).contiguous()


def pack_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Two [out, in] -> [panels, in, 32], each panel 16 columns of the gate and the same 16 of the other."""
    return pack_weight(interleave(gate, up))


def interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Two [out, in] -> one: 16 rows of the gate, the same 16 of the other, and so on; filled up with zeros."""
    columns, inner = gate.shape
    padded = gate.new_zeros(2, -(-columns // LANES) * LANES, inner)
    padded[0, :columns], padded[1, :columns] = gate, up
    return padded.view(2, -1, LANES, inner).transpose(0, 1).reshape(-1, inner)


@dataclass(frozen=True, slots=True)
class BytesWeight:
    """A weight in bytes: [panels, in / 4, 32, 4] int8, the columns' scales float32 and begins int32, [panels * 32]."""

    packed: torch.Tensor
    scales: torch.Tensor
    begins: torch.Tensor


def quantise(weight: torch.Tensor) -> BytesWeight:
    """[out, in] -> bytes, each output's greatest number becoming 127; `in` must be a multiple of 16."""
    columns, inner = weight.shape
    padded = torch.zeros(wide(columns), inner)
    padded[:columns] = weight.float()
    scales = padded.abs().amax(1).clamp_min(1e-12) / 127
    small = (padded / scales[:, None]).round().to(torch.int8)
    packed = small.view(-1, PANEL, inner // 4, 4).transpose(1, 2).contiguous()
    return BytesWeight(packed, scales, -128 * small.sum(1, dtype=torch.int32))


def linear_int8(
    x: torch.Tensor, weight: BytesWeight, bias: torch.Tensor | None, out: torch.Tensor, ending: int = STORE
) -> None:
    """The product of `linear` with the weight, and x on the way, in bytes."""
    rows, inner = x.shape
    if not rows:
        return
    panels, quarters = weight.packed.shape[:2]
    checks.check_product(x, 4 * quarters, panels, bias, out, ending)
    room = _workspace(rows * inner + 4 * rows)
    run(
        quantise_kernel(KINDS[x.dtype]),
        rows, inner, panels, x.data_ptr(), x.stride(0), weight.packed.data_ptr(), weight.scales.data_ptr(),
        weight.begins.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), out.stride(0),
        room + 4 * rows, room,
        after=int8_kernel(KINDS[x.dtype], ending), work=rows * inner * panels,
    )  # fmt: skip


def _paired(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and has_bf16_dot()


def unpack_weight(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """What `pack_weight` packed, [out, in], in a copy."""
    by_column = packed.transpose(1, 2)  # [panels, 32, in] or [panels, 32, in / 2, 2]
    return by_column.flatten(0, 1)[:columns].flatten(1).contiguous()


def unpack_gate(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """What `pack_gate` packed, gate above up [2 * out, in], in a copy."""
    rows = unpack_weight(packed, packed.shape[0] * PANEL).view(-1, 2, LANES, packed[0].numel() // PANEL)
    return rows.transpose(0, 1).flatten(1, 2)[:, :columns].flatten(0, 1).contiguous()


@dataclass(frozen=True, slots=True)
class LoraSegments:
    """A step's adapters in one layer.

    segments: [N, 8] int64, see `engine.cpu.kernels.lora.FIELDS`, covering all rows. ranks: the most that a segment has.
    factors: [T] int64, addresses of float32 [panels * 32] that multiply a row's sums, or 0; None where no segment has any.
    rows: T.
    """

    segments: torch.Tensor
    ranks: int
    factors: torch.Tensor | None
    rows: int

    def __post_init__(self) -> None:
        checks.check_segments(self.segments, self.ranks, self.factors, self.rows)


_room = torch.empty(0, dtype=torch.uint8)


def _workspace(size: int) -> int:
    """The address of `size` bytes, which are valid until the next call."""
    global _room
    if _room.numel() < size:
        _room = torch.empty(size, dtype=torch.uint8)
    address: int = _room.data_ptr()
    return address


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    ending: int = STORE,
    lora: LoraSegments | None = None,
) -> None:
    """Out [T, *] = x [T, in] times a packed weight plus a bias [*] float32; what adapters add, and their bias, is
    `lora`.

    `ending` STORE stores, WIDEN in float32, ADD adds to a float32 `out`, GATE gates the halves of each panel. Rows of
    `out` must have room for whole panels (GATE: half panels).
    """
    rows, inner = x.shape
    if not rows:
        return
    panels, kind, paired = weight.shape[0], KINDS[x.dtype], int(_paired(x.dtype))
    checks.check_packed(weight, x.dtype, paired)
    checks.check_product(x, weight.shape[1] << paired, panels, bias, out, ending)
    shapes.require(lora is None or lora.rows == rows, "adapters of a step of other rows", x)
    if lora is None:
        run(
            matmul.matmul_kernel(kind, paired, ending),
            rows, inner, panels, x.data_ptr(), x.stride(0), weight.data_ptr(), 0 if bias is None else bias.data_ptr(),
            out.data_ptr(), out.stride(0), work=rows * inner * panels,
        )  # fmt: skip
        return
    each = rows * PANEL * 4
    low = _workspace(num_threads() * each + rows * lora.ranks * 4)
    run(
        low_rank_kernel(kind, paired),
        rows, inner, panels, x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), out.stride(0),
        0 if lora.factors is None else lora.factors.data_ptr(), lora.segments.data_ptr(), len(lora.segments),
        low, lora.ranks, low + rows * lora.ranks * 4, each,
        after=adapted_kernel(kind, paired, ending), work=rows * inner * panels,
    )  # fmt: skip


def write_kv(
    key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Store key [HK, T, D] and value [HK, T, DV] at `slots` [T] int64, which `checks.check_slots` has seen."""
    heads, rows, dim = key.shape
    checks.check_new_keys(key, value, slots, keys, values)
    if key.stride(2) != 1 or value.stride(2) != 1 or not key.dtype == value.dtype == keys.dtype:
        key, value = key.to(keys.dtype).contiguous(), value.to(keys.dtype).contiguous()
    run(
        attention.write_kernel(KINDS[keys.dtype], _paired_cache(keys, values)),
        rows, slots.data_ptr(), heads, values.shape[2], keys.shape[3],
        key.data_ptr(), key.stride(1), key.stride(0), dim, keys.data_ptr(),
        value.data_ptr(), value.stride(1), value.stride(0), value.shape[2], values.shape[3], values.data_ptr(),
        work=2 * rows * heads * dim, wakes=False,
    )  # fmt: skip


def _paired_cache(keys: torch.Tensor, values: torch.Tensor) -> int:
    """Whether the kernels keep components of keys, and values, of this cache side by side in pairs."""
    return int(_paired(keys.dtype) and keys.shape[2] % 2 == 0 and values.shape[2] % 2 == 0)


class AttentionPlan:
    """The sequences and blocks that one step's attention reads; the same for all layers.

    `sequences`: (first row, tokens, length, blocks) each; the tokens are the last of `length`. `rows` are the step's,
    `num_blocks` the cache's, and nothing outside of them is ever read or written.
    """

    def __init__(
        self,
        sequences: Sequence[tuple[int, int, int, Sequence[int]]],
        block_size: int,
        lanes: int,
        rows: int,
        num_blocks: int,
    ) -> None:
        for sequence in sequences:
            shapes.check_tables(*sequence, rows, block_size, num_blocks)
        self.block_size, self.lanes, self.rows, self.num_blocks = block_size, lanes, rows, num_blocks
        tables = [block for *_, blocks in sequences for block in blocks]
        starts = np.cumsum([0] + [len(blocks) for *_, blocks in sequences[:-1]])
        self.tables = torch.tensor(tables, dtype=torch.int64)
        numbers = np.array([entry[:3] for entry in sequences], dtype=np.int64).reshape(-1, 3)
        self.sequences = torch.from_numpy(np.column_stack([numbers, starts]).astype(np.int64))
        self._counts = numbers[:, 1]
        self.longest = max((len(blocks) for *_, blocks in sequences), default=0) * lanes
        self._tasks: dict[tuple[int, int], torch.Tensor] = {}
        self._scratch: dict[int, torch.Tensor] = {}

    def tasks(self, kv_heads: int, group: int) -> torch.Tensor:
        """[N, 3] int64: sequence, KV head, first row of a tile; the later ones of a sequence, which take longest,
        first.
        """
        tasks = self._tasks.get((kv_heads, group))
        if tasks is None:
            each = -(-self._counts * group // MAX_ROWS) * kv_heads
            sequence = np.repeat(np.arange(len(each)), each)
            within = np.arange(len(sequence)) - np.repeat(np.cumsum(each) - each, each)
            columns = np.column_stack([sequence, within % kv_heads, within // kv_heads * MAX_ROWS])
            tasks = torch.from_numpy(columns[::-1].astype(np.int64))
            self._tasks[kv_heads, group] = tasks
        return tasks

    def scratch(self, each: int) -> torch.Tensor:
        """Scratch memory of `each` bytes for every worker."""
        room = self._scratch.get(each)
        if room is None:
            room = self._scratch[each] = torch.empty(num_threads() * each, dtype=torch.uint8)
        return room

    def scratch_bytes(self, key_dim: int, value_width: int) -> int:
        """Scratch bytes that one worker needs for the longest sequence."""
        return attention.scratch_bytes(key_dim, value_width, self.longest)


def attend(
    plan: AttentionPlan,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    """Query [H, T, D] over the cache's keys and values -> out [T, H, DV]; scale defaults to D ** -0.5,
    sinks are [H].
    """
    heads, rows, dim = query.shape
    kv_heads, width = keys.shape[1], values.shape[3]
    shapes.require(rows == plan.rows, "queries of other rows than the step's", query)
    checks.check_attention(query, keys, values, out, sinks, (plan.num_blocks, plan.block_size, plan.lanes))
    if query.stride(2) != 1 or query.dtype != keys.dtype:
        query = query.to(keys.dtype).contiguous()
    sink_row = None if sinks is None else sinks.float().contiguous()
    tasks = plan.tasks(kv_heads, heads // kv_heads)
    each = plan.scratch_bytes(dim, width)
    run(
        attention.attend_kernel(KINDS[keys.dtype], _paired_cache(keys, values)),
        tasks.data_ptr(), len(tasks), plan.sequences.data_ptr(), plan.tables.data_ptr(),
        query.data_ptr(), query.stride(1), query.stride(0), keys.data_ptr(), values.data_ptr(), kv_heads,
        heads // kv_heads, dim, out.shape[2], width, plan.block_size, plan.lanes,
        float_bits(dim**-0.5 if scale is None else scale), window or 0, float_bits(softcap or 0.0),
        0 if sink_row is None else sink_row.data_ptr(), out.data_ptr(), out.stride(0), out.stride(1),
        plan.scratch(each).data_ptr(), each, work=len(tasks) * plan.longest * dim // 2,
    )  # fmt: skip


def choose(logits: torch.Tensor, temperatures: Sequence[float], uniforms: Sequence[float]) -> list[int]:
    """A token for every row of logits [B, V]: at temperature 0 the most likely, else the one at which the cumulative
    distribution reaches the row's uniform number.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, columns = logits.shape
    shapes.require(
        len(temperatures) == len(uniforms) == rows and columns > 0, "one temperature and number a row", logits
    )
    heat = torch.tensor(temperatures, dtype=torch.float32)
    draws = torch.tensor(uniforms, dtype=torch.float64)
    out = torch.empty(rows, dtype=torch.int64)
    run(
        sampling.choose_kernel(KINDS[logits.dtype]),
        rows, columns, logits.data_ptr(), logits.stride(0), heat.data_ptr(), draws.data_ptr(), out.data_ptr(),
        work=rows * columns // 4,
    )  # fmt: skip
    tokens: list[int] = out.tolist()
    return tokens


@dataclass(frozen=True, slots=True)
class Selected:
    """The best tokens of rows of logits: values [B, N] float32, -inf after a row's last, ids [B, N] int64, N the same
    for all; of each row the log [B, 1] of the sum of e^((x - best) / temperature) over all its tokens.
    """

    values: torch.Tensor
    ids: torch.Tensor
    log_totals: torch.Tensor


def select(logits: torch.Tensor, temperatures: Sequence[float], wanted: int) -> Selected | None:
    """At least the `wanted` best of every row of logits [B, V] that are over e^-32 of its best; None where a row has
    too many equals for that.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, columns = logits.shape
    shapes.require(len(temperatures) == rows and columns > 0 < wanted, "one temperature a row, and some wanted", logits)
    room = min(columns, 4 * wanted)
    heat = torch.tensor(temperatures, dtype=torch.float32)
    values, ids = torch.empty(rows, room), torch.zeros(rows, room, dtype=torch.int64)
    counts, totals = torch.empty(rows, dtype=torch.int64), torch.empty(rows, 1)
    run(
        sampling.select_kernel(KINDS[logits.dtype]),
        rows, columns, logits.data_ptr(), logits.stride(0), heat.data_ptr(), wanted, room, values.data_ptr(),
        ids.data_ptr(), counts.data_ptr(), totals.data_ptr(), work=rows * columns // 4,
    )  # fmt: skip
    if int(counts.min()) < 0:
        return None
    beyond = torch.arange(room) >= counts[:, None]
    return Selected(values.masked_fill_(beyond, -torch.inf), ids, totals.log_())
