"""The attention kernels as functions over torch tensors, and the plan of a step that all layers share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from engine import shapes
from engine.cpu.kernels import amx_attention, attention, checks, span_attention
from engine.cpu.kernels.amx import has_tiles
from engine.cpu.kernels.amx_attention_tiles import TASK_ROWS
from engine.cpu.kernels.emit import LANES, MAX_ROWS, UNPAIRED
from engine.cpu.kernels.ops import KINDS, pairs_of
from engine.cpu.kernels.threads import float_bits, num_threads, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.cpu.kernels.threads import Program


Numbers = np.ndarray[Any, np.dtype[np.int64]]


class Call(NamedTuple):
    """One kernel's part of a step's attention."""

    label: str
    kernel: Any
    arguments: tuple[int, ...]
    """What the kernel reads of the plan: its first arguments."""
    work: int
    """How much there is to do, as `run` counts it: for each tile of rows half a product with each key."""


WRITE, ATTEND, ATTEND_SPANS = "write_kv", "attend", "attend_spans"
"""The labels of recorded calls."""


class _Shape(NamedTuple):
    """The KV heads, the query heads of each, and their key dim."""

    kv_heads: int
    group: int
    dim: int


def write_kv(
    key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Store key [HK, T, D] and value [HK, T, DV] at `slots` [T] int64, which `checks.check_slots` has seen."""
    heads, rows, dim = key.shape
    checks.check_new_keys(key, value, slots, keys, values)
    if key.stride(2) != 1 or value.stride(2) != 1 or not key.dtype == value.dtype == keys.dtype:
        key, value = key.to(keys.dtype).contiguous(), value.to(keys.dtype).contiguous()
    run(
        attention.write_kernel(KINDS[keys.dtype], paired_cache(keys, values)),
        rows, slots.data_ptr(), heads, values.shape[2], keys.shape[3],
        key.data_ptr(), key.stride(1), key.stride(0), dim, keys.data_ptr(),
        value.data_ptr(), value.stride(1), value.stride(0), value.shape[2], values.shape[3], values.data_ptr(),
        work=2 * rows * heads * dim, wakes=False, label=WRITE,
    )  # fmt: skip


def paired_cache(keys: torch.Tensor, values: torch.Tensor) -> int:
    """How the kernels multiply components of keys, and values, of this cache; unless UNPAIRED, they lie side by side in pairs."""
    return pairs_of(keys.dtype) if keys.shape[2] % 2 == 0 and values.shape[2] % 2 == 0 else UNPAIRED


def _tiled_cache(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether this cache's heads and blocks fill AMX tiles."""
    return bool(
        paired_cache(keys, values) and has_tiles() and keys.shape[2] % LANES == 0 and values.shape[2] % LANES == 0
    )


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
        self._lanes = lanes * np.array([len(blocks) for *_, blocks in sequences], dtype=np.int64)
        self._calls: dict[tuple[object, ...], list[Call]] = {}
        self._kept: list[torch.Tensor] = []
        self._scratch: dict[int, torch.Tensor] = {}

    def calls(self, heads: int, keys: torch.Tensor, values: torch.Tensor) -> list[Call]:
        """The kernel calls for queries of `heads` over one layer's cache. Their number and labels are those of every plan."""
        like = (heads, keys.dtype, keys.shape, values.shape)
        calls = self._calls.get(like)
        if calls is None:
            calls = self._calls[like] = self._new_calls(heads, keys, values)
        return calls

    def _new_calls(self, heads: int, keys: torch.Tensor, values: torch.Tensor) -> list[Call]:
        shape = _Shape(keys.shape[1], heads // keys.shape[1], keys.shape[2])
        width, kind, paired = values.shape[3], KINDS[keys.dtype], paired_cache(keys, values)
        every = np.arange(len(self._counts))
        if _tiled_cache(keys, values):
            each = amx_attention.tile_scratch_bytes(shape.dim, width, self.block_size)
            kernel = amx_attention.tile_attend_kernel()
            return [self._call(ATTEND, kernel, every, shape, TASK_ROWS, TASK_ROWS, each)]
        with_spans = span_attention.pays(kind, paired)
        spanned = with_spans & (self._counts * shape.group >= span_attention.LEAST_ROWS)
        few, many = every[~spanned], every[spanned]
        each = attention.scratch_bytes(shape.dim, width, self._longest(few))
        calls = [self._call(ATTEND, attention.attend_kernel(kind, paired), few, shape, MAX_ROWS, MAX_ROWS, each)]
        if with_spans:
            longest, tiles = self._longest(many), self._tiles(many, shape, MAX_ROWS)
            rows = span_attention.rows_of_task(longest, tiles // num_threads())
            each = span_attention.span_scratch_bytes(shape.dim, width, self.lanes, longest, rows)
            kernel = span_attention.span_attend_kernel(kind, paired)
            calls.append(self._call(ATTEND_SPANS, kernel, many, shape, rows, MAX_ROWS, each))
        return calls

    def _call(self, label: str, kernel: Any, chosen: Numbers, shape: _Shape, rows: int, tile: int, each: int) -> Call:
        """A kernel's work on the chosen sequences, in tasks of at most so many rows, with `each` bytes of scratch for every worker."""
        tasks = self._tasks(chosen, shape, rows)
        self._kept.append(tasks)
        room = self._scratch.get(each)
        if room is None:
            room = self._scratch[each] = torch.empty(num_threads() * each, dtype=torch.uint8)
        arguments = (
            tasks.data_ptr(), len(tasks), self.sequences.data_ptr(), self.tables.data_ptr(), room.data_ptr(), each,
        )  # fmt: skip
        work = self._tiles(chosen, shape, tile) * self._longest(chosen) * shape.dim // 2
        return Call(label, kernel, arguments, work)

    def _tasks(self, chosen: Numbers, shape: _Shape, most: int) -> torch.Tensor:
        """[N, 4] int64: sequence, KV head, first row and rows, `most` of them at most; one head after another, so that a core's second cache
        keeps its keys and values, and of each the later rows, which take longest, first.
        """
        total = self._counts[chosen] * shape.group
        count = -(-total // most)
        each = count * shape.kv_heads
        place = np.repeat(np.arange(len(each)), each)
        within = np.arange(len(place)) - np.repeat(np.cumsum(each) - each, each)
        own = np.repeat(count, each)
        first = within % own * most
        columns = np.column_stack([chosen[place], within // own, first, np.minimum(most, total[place] - first)])
        return torch.from_numpy(columns[::-1].astype(np.int64))

    def _tiles(self, chosen: Numbers, shape: _Shape, tile: int) -> int:
        """The tiles of so many rows that these sequences fill."""
        return int((-(-self._counts[chosen] * shape.group // tile)).sum()) * shape.kv_heads

    def _longest(self, chosen: Numbers) -> int:
        """The lanes of the longest of these sequences."""
        return int(self._lanes[chosen].max(initial=0))

    def change(
        self, program: Program, slots: torch.Tensor, heads: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Let the recorded calls of `write_kv` and `attend`, in layers of such a cache, work for this plan."""
        rows, dim = len(slots), keys.shape[2]
        program.change(WRITE, (rows, slots.data_ptr()), 2 * rows * keys.shape[1] * dim, wakes=False)
        for call in self.calls(heads, keys, values):
            program.change(call.label, call.arguments, call.work, wakes=True)


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
    for call in plan.calls(heads, keys, values):
        run(
            call.kernel,
            *call.arguments, query.data_ptr(), query.stride(1), query.stride(0), keys.data_ptr(), values.data_ptr(), kv_heads,
            heads // kv_heads, dim, out.shape[2], width, plan.block_size, plan.lanes,
            float_bits(dim**-0.5 if scale is None else scale), window or 0, float_bits(softcap or 0.0),
            0 if sink_row is None else sink_row.data_ptr(), out.data_ptr(), out.stride(0), out.stride(1),
            work=call.work, label=call.label,
        )  # fmt: skip
