"""The attention kernels as functions over torch tensors, and the plan of a step that all layers share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engine import shapes
from engine.cpu.kernels import amx_attention, attention, checks
from engine.cpu.kernels.amx import has_tiles
from engine.cpu.kernels.amx_attention_tiles import TASK_ROWS
from engine.cpu.kernels.emit import LANES, UNPAIRED
from engine.cpu.kernels.ops import KINDS, pairs_of
from engine.cpu.kernels.threads import float_bits, num_threads, run
from engine.cpu.kernels.tiles import MAX_ROWS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.cpu.kernels.threads import Program

WRITE, ATTEND = "write_kv", "attend"
"""The labels of recorded calls."""


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
        self.longest = max((len(blocks) for *_, blocks in sequences), default=0) * lanes
        self._tasks: dict[tuple[int, int, int], torch.Tensor] = {}
        self._scratch: dict[int, torch.Tensor] = {}

    def tasks(self, kv_heads: int, group: int, most: int) -> torch.Tensor:
        """[N, 4] int64: sequence, KV head, first row and rows, `most` of them at most; one head after another, so that a core's second cache
        keeps its keys and values, and of each the later rows, which take longest, first.
        """
        tasks = self._tasks.get((kv_heads, group, most))
        if tasks is None:
            count = -(-self._counts * group // most)
            each = count * kv_heads
            sequence = np.repeat(np.arange(len(each)), each)
            within = np.arange(len(sequence)) - np.repeat(np.cumsum(each) - each, each)
            own = np.repeat(count, each)
            first = within % own * most
            rows = np.minimum(most, self._counts[sequence] * group - first)
            columns = np.column_stack([sequence, within // own, first, rows])
            tasks = torch.from_numpy(columns[::-1].astype(np.int64))
            self._tasks[kv_heads, group, most] = tasks
        return tasks

    def scratch(self, each: int) -> torch.Tensor:
        """Scratch memory of `each` bytes for every worker."""
        room = self._scratch.get(each)
        if room is None:
            room = self._scratch[each] = torch.empty(num_threads() * each, dtype=torch.uint8)
        return room

    def arguments(self, heads: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[int, ...]:
        """What the kernel reads of this plan, for queries of `heads` over one layer's cache: its first arguments."""
        tiled, dim, width = _tiled_cache(keys, values), keys.shape[2], values.shape[3]
        kv_heads, group = keys.shape[1], heads // keys.shape[1]
        if tiled:
            rows, each = TASK_ROWS, amx_attention.tile_scratch_bytes(dim, width, self.block_size)
        else:
            tiles = self._tiles(kv_heads, group, MAX_ROWS) // num_threads()
            rows = attention.rows_of_task(self.longest, int(self._counts.max(initial=0)) * group, tiles)
            each = attention.scratch_bytes(dim, width, self.lanes, self.longest, rows)
        tasks = self.tasks(kv_heads, group, rows)
        room = self.scratch(each)
        return (
            tasks.data_ptr(), len(tasks), self.sequences.data_ptr(), self.tables.data_ptr(), room.data_ptr(), each,
        )  # fmt: skip

    def change(
        self, program: Program, slots: torch.Tensor, heads: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Let the recorded calls of `write_kv` and `attend`, in layers of such a cache, work for this plan."""
        rows, dim = len(slots), keys.shape[2]
        program.change(WRITE, (rows, slots.data_ptr()), 2 * rows * keys.shape[1] * dim, wakes=False)
        arguments = self.arguments(heads, keys, values)
        program.change(ATTEND, arguments, self.work(heads, keys, values), wakes=True)

    def work(self, heads: int, keys: torch.Tensor, values: torch.Tensor) -> int:
        """How much there is to do, as `run` counts it: for each tile of rows half a product with each key."""
        kv_heads, dim, tile = keys.shape[1], keys.shape[2], TASK_ROWS if _tiled_cache(keys, values) else MAX_ROWS
        tiles = self._tiles(kv_heads, heads // kv_heads, tile)
        return int(tiles * self.longest * dim // 2)

    def _tiles(self, kv_heads: int, group: int, tile: int) -> int:
        """The tiles of so many rows that all sequences fill."""
        return int((-(-self._counts * group // tile)).sum()) * kv_heads


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
    if _tiled_cache(keys, values):
        kernel = amx_attention.tile_attend_kernel()
    else:
        kernel = attention.attend_kernel(KINDS[keys.dtype], paired_cache(keys, values))
    arguments = plan.arguments(heads, keys, values)
    run(
        kernel,
        *arguments, query.data_ptr(), query.stride(1), query.stride(0), keys.data_ptr(), values.data_ptr(), kv_heads,
        heads // kv_heads, dim, out.shape[2], width, plan.block_size, plan.lanes,
        float_bits(dim**-0.5 if scale is None else scale), window or 0, float_bits(softcap or 0.0),
        0 if sink_row is None else sink_row.data_ptr(), out.data_ptr(), out.stride(0), out.stride(1),
        work=plan.work(heads, keys, values), label=ATTEND,
    )  # fmt: skip
