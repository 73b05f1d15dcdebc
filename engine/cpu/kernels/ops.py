"""The kernels as functions over torch tensors, whose shapes are checked before their addresses are
taken (checks.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import local

import torch

from engine import shapes
from engine.cpu import large_pages
from engine.cpu.kernels import amx_matmul, checks, layers, matmul, sampling
from engine.cpu.kernels.amx import LINE, TILE_ROWS, has_tiles
from engine.cpu.kernels.amx_low_rank import BEGIN_ROOM, GROUP, tile_low_rank_kernel
from engine.cpu.kernels.coded import CodedWeight, decode
from engine.cpu.kernels.emit import BF16, F16, F32, LANES, UNPAIRED, WIDE_PAIRS, pairing
from engine.cpu.kernels.int8 import int8_kernel, quantise_kernel
from engine.cpu.kernels.lora import adapted_kernel, low_rank_kernel
from engine.cpu.kernels.threads import float_bits, keep, num_threads, run
from engine.cpu.kernels.tiles import PANEL, STORE

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


def wide(columns: int) -> int:
    """`columns` rounded up to whole panels: the width that the output rows of a product need."""
    return -(-columns // PANEL) * PANEL


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] -> [panels, in, 32], the last panel filled up with zeros; bfloat16 in pairs (`pairs_of`), and
    then `in` must be even.
    """
    columns, inner = weight.shape
    padded = weight.new_zeros(wide(columns), inner)
    padded[:columns] = weight
    if pairs_of(weight.dtype) != UNPAIRED:
        return padded.view(-1, PANEL, inner // 2, 2).transpose(1, 2).contiguous()
    return padded.view(-1, PANEL, inner).transpose(1, 2).contiguous()


def pack_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Two [out, in] -> [panels, in, 32], each panel 16 columns of the gate and the same 16 of the other."""
    return pack_weight(interleave(gate, up))


def pack_ranks(a: torch.Tensor) -> torch.Tensor:
    """An adapter's A [ranks, in] as the kernels want it: with tiles [groups of 16, in / 2, 16, 2], filled up with zeros, else as it is."""
    ranks, inner = a.shape
    if not _tiled(a.dtype):
        return a.contiguous()
    padded = a.new_zeros(-(-ranks // GROUP) * GROUP, inner)
    padded[:ranks] = a
    return padded.view(-1, GROUP, inner // 2, 2).transpose(1, 2).contiguous()


def _tiled(dtype: torch.dtype) -> bool:
    """Whether products of this type run in AMX tiles."""
    return pairs_of(dtype) != UNPAIRED and has_tiles()


def interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Two [out, in] -> one: 16 rows of the gate, the same 16 of the other, and so on; filled up with zeros."""
    columns, inner = gate.shape
    padded = gate.new_zeros(2, -(-columns // LANES) * LANES, inner)
    padded[0, :columns], padded[1, :columns] = gate, up
    return padded.view(2, -1, LANES, inner).transpose(0, 1).reshape(-1, inner)


@dataclass(frozen=True, slots=True)
class BytesWeight:
    """A weight in bytes: [panels, width / 4, 32, 4] int8, the columns' scales float32 and begins int32, [panels * 32].

    The width is the number of inputs, filled up with zeros to whole tiles where the CPU has tiles.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    begins: torch.Tensor
    inner: int


def quantise(weight: torch.Tensor) -> BytesWeight:
    """[out, in] -> bytes, each output's greatest number becoming 127; `in` must be a multiple of 16."""
    columns, inner = weight.shape
    padded = torch.zeros(wide(columns), _byte_width(inner))
    padded[:columns, :inner] = weight.float()
    scales = padded.abs().amax(1).clamp_min(1e-12) / 127
    small = (padded / scales[:, None]).round().to(torch.int8)
    packed = small.view(-1, PANEL, padded.shape[1] // 4, 4).transpose(1, 2).contiguous()
    return BytesWeight(packed, scales, -128 * small.sum(1, dtype=torch.int32), inner)


def _byte_width(inner: int) -> int:
    return -(-inner // LINE) * LINE if has_tiles() else inner


def linear_int8(
    x: torch.Tensor, weight: BytesWeight, bias: torch.Tensor | None, out: torch.Tensor, ending: int = STORE
) -> None:
    """The product of `linear` with the weight, and x on the way, in bytes."""
    rows, inner = x.shape
    if not rows:
        return
    panels, width = weight.packed.shape[0], 4 * weight.packed.shape[1]
    checks.check_product(x, weight.inner, panels, bias, out, ending)
    if has_tiles():
        _in_tiles(x, weight, bias, out, ending, None)
        return
    room = _workspace(rows * width + 4 * rows)
    run(
        quantise_kernel(KINDS[x.dtype]),
        rows, inner, panels, x.data_ptr(), x.stride(0), weight.packed.data_ptr(), weight.scales.data_ptr(),
        weight.begins.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), out.stride(0),
        room + 4 * rows, room, width, num_threads(),
        after=int8_kernel(KINDS[x.dtype], ending), work=rows * inner * panels,
    )  # fmt: skip


def _in_tiles(
    x: torch.Tensor,
    weight: torch.Tensor | CodedWeight | BytesWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    ending: int,
    lora: LoraSegments | None,
) -> None:
    """A product in AMX tiles: in bytes, or in bfloat16, to which `lora` may add."""
    rows, inner = x.shape
    kind, workers, coded = KINDS[x.dtype], num_threads(), int(isinstance(weight, CodedWeight))
    packed = weight if isinstance(weight, torch.Tensor) else weight.packed
    panels = weight.panels if isinstance(weight, CodedWeight) else packed.shape[0]
    in_bytes = isinstance(weight, BytesWeight)
    width = 4 * packed.shape[1] if in_bytes else 0
    shares = amx_matmul.plan(rows, width // 64 if in_bytes else inner // 32, panels, workers)
    before, small, second, apart, scales, begins = None, 0, 0, 0, 0, 0
    segments, number, factors, begin_sums, begin_bytes = 0, 0, 0, 0, 0
    decoded_bytes = shares.decoded_bytes if coded else 0
    first_bytes = workers * (shares.partial_bytes + decoded_bytes)
    if isinstance(weight, BytesWeight):
        # Rows an odd number of lines apart, as those of bfloat16 are (engine/cpu/fused.py), and behind them their scales.
        apart = (width // LINE | 1) * LINE
        room = _workspace(first_bytes + rows * apart + 4 * rows)
        small, second = room + first_bytes, room + first_bytes + rows * apart
        scales, begins = weight.scales.data_ptr(), weight.begins.data_ptr()
        before = quantise_kernel(kind)
    elif lora is not None:
        keep(lora)
        begin_bytes = shares.blocks * shares.panels * BEGIN_ROOM
        room = _workspace(first_bytes + workers * begin_bytes + 2 * (rows + TILE_ROWS) * lora.ranks)
        begin_sums = room + first_bytes
        small, second = begin_sums + workers * begin_bytes, lora.ranks
        segments, number = lora.segments.data_ptr(), len(lora.segments)
        factors = 0 if lora.factors is None else lora.factors.data_ptr()
        before = tile_low_rank_kernel()
    else:
        room = _workspace(first_bytes)
    product = amx_matmul.tile_product_kernel(kind, int(in_bytes), coded, int(lora is not None), ending)
    run(
        product if before is None else before,
        rows, inner, panels, x.data_ptr(), x.stride(0), packed.data_ptr(), out.data_ptr(), out.stride(0), factors, segments, number,
        small, second, apart, 0 if bias is None else bias.data_ptr(), scales, begins, workers,
        shares.ranges, shares.panels, shares.steps, room, shares.partial_bytes, begin_sums, begin_bytes,
        room + workers * shares.partial_bytes, decoded_bytes, int(shares.in_turn),
        after=None if before is None else product, work=rows * inner * panels,
    )  # fmt: skip


def pairs_of(dtype: torch.dtype) -> int:
    """How numbers of this type are multiplied: UNPAIRED, DOT_PAIRS or WIDE_PAIRS. Both latter are packed in pairs."""
    return pairing() if dtype == torch.bfloat16 else UNPAIRED


def unpack_weight(packed: torch.Tensor | CodedWeight, columns: int) -> torch.Tensor:
    """What `pack_weight` packed, [out, in], in a copy."""
    if isinstance(packed, CodedWeight):
        packed = decode(packed)
    by_column = packed.transpose(1, 2)  # [panels, 32, in] or [panels, 32, in / 2, 2]
    return by_column.flatten(0, 1)[:columns].flatten(1).contiguous()


def unpack_gate(packed: torch.Tensor | CodedWeight, columns: int) -> torch.Tensor:
    """What `pack_gate` packed, gate above up [2 * out, in], in a copy."""
    panels = packed.panels if isinstance(packed, CodedWeight) else packed.shape[0]
    rows = unpack_weight(packed, panels * PANEL)
    rows = rows.view(-1, 2, LANES, rows.shape[1])
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


LEAST_ROOM = 1 << 20
_rooms = local()


def _workspace(size: int) -> int:
    """The address of `size` bytes, which are valid until the calling thread's next call."""
    room: torch.Tensor | None = getattr(_rooms, "last", None)
    if room is None or room.numel() < size:
        # In large pages: the lines of small ones may meet in few places of the second cache, which took up to a fifth of a product's time.
        room = _rooms.last = large_pages.empty((1 << max(size - 1, LEAST_ROOM).bit_length(),), torch.uint8)
    keep(room)
    address: int = room.data_ptr()
    return address


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | CodedWeight,
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
    kind, paired, coded = KINDS[x.dtype], pairs_of(x.dtype), int(isinstance(weight, CodedWeight))
    if isinstance(weight, CodedWeight):
        panels, packed = weight.panels, weight.packed
        checks.check_coded(weight, x.dtype)
        checks.check_product(x, weight.inner, panels, bias, out, ending)
    else:
        panels, packed = weight.shape[0], weight
        in_pairs = int(paired != UNPAIRED)
        checks.check_packed(weight, x.dtype, in_pairs)
        checks.check_product(x, weight.shape[1] << in_pairs, panels, bias, out, ending)
    shapes.require(lora is None or lora.rows == rows, "adapters of a step of other rows", x)
    if _tiled(x.dtype):
        _in_tiles(x, weight, bias, out, ending, lora)
        return
    widened = paired == WIDE_PAIRS
    wide_bytes = -(-4 * rows * inner // LINE) * LINE if widened else 0
    panel_bytes, sum_bytes = matmul.room_bytes(rows, inner, kind, paired, coded)
    if lora is None:
        room = _workspace(wide_bytes + num_threads() * (panel_bytes + sum_bytes))
        source, stride = (room, inner) if widened else (x.data_ptr(), x.stride(0))
        product = matmul.matmul_kernel(kind, paired, coded, ending)
        run(
            matmul.widen_kernel() if widened else product,
            rows, inner, panels, source, stride, packed.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), out.stride(0), num_threads(),
            x.data_ptr(), x.stride(0), room + wide_bytes, panel_bytes + sum_bytes, panel_bytes,
            after=product if widened else None, work=rows * inner * panels,
        )  # fmt: skip
        return
    keep(lora)
    # Whole lines, so that what is decoded behind them begins one.
    each, low_bytes = rows * PANEL * 4 + panel_bytes, -(-rows * lora.ranks * 4 // LINE) * LINE
    room = _workspace(wide_bytes + low_bytes + num_threads() * each)
    low = room + wide_bytes
    run(
        low_rank_kernel(kind, paired, widened),
        rows, inner, panels, x.data_ptr(), x.stride(0), packed.data_ptr(), out.data_ptr(), out.stride(0),
        0 if lora.factors is None else lora.factors.data_ptr(), lora.segments.data_ptr(), len(lora.segments),
        low, lora.ranks, low + low_bytes, each, num_threads(), room,
        after=adapted_kernel(kind, paired, coded, ending), work=rows * inner * panels,
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


def scores(
    logits: torch.Tensor, numbers: Sequence[int], temperatures: Sequence[float], tokens: Sequence[int]
) -> tuple[list[float], list[int]]:
    """How likely `tokens` are in the rows `numbers` of logits [B, V] at these temperatures, over 0: log-probabilities, and ranks from 1."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    columns, rows = logits.shape[1], len(numbers)
    shapes.require(
        len(temperatures) == len(tokens) == rows > 0
        and 0 <= min(numbers) <= max(numbers) < logits.shape[0]
        and 0 <= min(tokens) <= max(tokens) < columns,
        "a row, a temperature and a token each",
        logits,
    )
    heat, index = torch.tensor(temperatures, dtype=torch.float32), torch.tensor([numbers, tokens])
    bests, totals, ranks = torch.empty(rows), torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    run(
        sampling.score_kernel(KINDS[logits.dtype]),
        rows, columns, logits.data_ptr(), logits.stride(0), index[0].data_ptr(), heat.data_ptr(), index[1].data_ptr(),
        bests.data_ptr(), totals.data_ptr(), ranks.data_ptr(), work=rows * columns // 4,
    )  # fmt: skip
    own = logits[index[0], index[1]].float()
    return ((own - bests) / heat - totals.log()).tolist(), ranks.tolist()


@dataclass(frozen=True, slots=True)
class Selected:
    """The best tokens of rows of logits: values [B, N] float32, -inf after a row's last, ids [B, N] int64, N the same
    for all; of each row the log [B, 1] of the sum of e^((x - best) / temperature) over all its tokens. `overflown`: the rows of which
    nothing was selected, as they have too many equals.
    """

    values: torch.Tensor
    ids: torch.Tensor
    log_totals: torch.Tensor
    overflown: list[int]


LEAST_ROOM = 1024
"""Equals that fit beside few wanted tokens."""


def select(logits: torch.Tensor, temperatures: Sequence[float], wanted: int) -> Selected:
    """At least the `wanted` best of every row of logits [B, V] that are over e^-32 of its best."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, columns = logits.shape
    shapes.require(len(temperatures) == rows and columns > 0 < wanted, "one temperature a row, and some wanted", logits)
    room = min(columns, max(4 * wanted, LEAST_ROOM))
    heat = torch.tensor(temperatures, dtype=torch.float32)
    values, ids = torch.empty(rows, room), torch.zeros(rows, room, dtype=torch.int64)
    counts, totals = torch.empty(rows, dtype=torch.int64), torch.empty(rows, 1)
    run(
        sampling.select_kernel(KINDS[logits.dtype]),
        rows, columns, logits.data_ptr(), logits.stride(0), heat.data_ptr(), wanted, room, values.data_ptr(),
        ids.data_ptr(), counts.data_ptr(), totals.data_ptr(), work=rows * columns // 4,
    )  # fmt: skip
    beyond = torch.arange(room) >= counts[:, None]
    overflown = (counts < 0).nonzero().flatten().tolist()
    return Selected(values.masked_fill_(beyond, -torch.inf), ids, totals.log_(), overflown)
