"""Intel's AMX as LLVM code: eight tile registers of up to 16 rows of 64 bytes, and the products of two tiles.

LLVM's intrinsics take a tile's number as an immediate, so tiles need no type. A kernel shapes the tiles before it uses
them and releases them at its end; shaping clears them. Sums are float32 or int32; each row of a product depends on no
other row, and each sum has one order whatever the shape.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import sys
from functools import cache
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import cgutils

from engine.cpu.kernels.emit import BYTE, FIRST, I16, I32, I64

TILE_ROWS = 16
LINE = 64
"""Bytes of a tile's row, and of a cache line."""
_POINTER = ir.PointerType(BYTE)
_SHAPE_BYTES, _WIDTHS, _HEIGHTS = 64, 16, 48
"""The operand of LDTILECFG: palette 1, from byte 16 the bytes of each tile's row, from byte 48 each tile's rows."""
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Linux's number of arch_prctl on x86-64, ARCH_REQ_XCOMP_PERM, and the number of the tiles' state."""

logger = logging.getLogger(__name__)


def on_linux() -> bool:
    """Whether the system is one whose request for tiles is known here: Linux on x86-64."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


@cache
def has_tiles() -> bool:
    """Whether this CPU multiplies tiles of bfloat16 and of bytes, and the system lets this process use them."""
    features = get_host_cpu_features()
    if not all(features.get(name) for name in ("amx-tile", "amx-bf16", "amx-int8", "avx512bf16")) or not on_linux():
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA):
        reason = os.strerror(ctypes.get_errno())
        logger.warning("this CPU has AMX, but the system denies its use (%s): products use vectors", reason)
        return False
    return True


def _call(builder: Any, name: str, *arguments: Any) -> None:
    signature = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, signature, name), arguments)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _POINTER)


def offset(builder: Any, address: Any, number: Any, scale: int) -> Any:
    """The address `number` times `scale` bytes further on."""
    return builder.add(address, builder.mul(number, I64(scale)))


def shape(builder: Any, tiles: list[tuple[Any, Any]]) -> None:
    """Give the first tiles their rows and the bytes of a row (int64 each, 1 to 16 and 1 to 64), and clear all."""
    area = cgutils.alloca_once(builder, ir.ArrayType(I64, _SHAPE_BYTES // 8))
    address = builder.ptrtoint(area, I64)
    for word in range(_SHAPE_BYTES // 8):
        builder.store(I64(1 if word == 0 else 0), builder.gep(area, [I32(0), I32(word)]))
    for number, (rows, width) in enumerate(tiles):
        there = builder.inttoptr(builder.add(address, I64(_WIDTHS + 2 * number)), ir.PointerType(I16))
        builder.store(builder.trunc(width, I16), there)
        there = builder.inttoptr(builder.add(address, I64(_HEIGHTS + number)), _POINTER)
        builder.store(builder.trunc(rows, BYTE), there)
    _call(builder, "llvm.x86.ldtilecfg", _pointer(builder, address))


def release(builder: Any) -> None:
    """Give the tiles back, so that the system does not keep their state."""
    _call(builder, "llvm.x86.tilerelease")


def clear(builder: Any, tile: int) -> None:
    """Set all sums of a tile to zero."""
    _call(builder, "llvm.x86.tilezero", BYTE(tile))


def load(builder: Any, tile: int, address: Any, stride: Any) -> None:
    """Load a tile whose rows lie `stride` bytes apart; 0: all rows are the same."""
    _call(builder, "llvm.x86.tileloadd64", BYTE(tile), _pointer(builder, address), stride)


def load_passing(builder: Any, tile: int, address: Any, stride: Any) -> None:
    """The same for rows of which the first cache need not keep anything."""
    _call(builder, "llvm.x86.tileloaddt164", BYTE(tile), _pointer(builder, address), stride)


def store(builder: Any, tile: int, address: Any, stride: Any) -> None:
    """Store a tile, its rows `stride` bytes apart."""
    _call(builder, "llvm.x86.tilestored64", BYTE(tile), _pointer(builder, address), stride)


def add_products(builder: Any, total: int, a: int, b: int) -> None:
    """Tile `total` [M, N] float32 += a [M, K] times b [K / 2, N, 2], both bfloat16."""
    _call(builder, "llvm.x86.tdpbf16ps", BYTE(total), BYTE(a), BYTE(b))


def add_byte_products(builder: Any, total: int, a: int, b: int) -> None:
    """Tile `total` [M, N] int32 += a [M, K] unsigned bytes times b [K / 4, N, 4] signed bytes."""
    _call(builder, "llvm.x86.tdpbusd", BYTE(total), BYTE(a), BYTE(b))


def fetch_lines(builder: Any, address: Any, count: int, where: int = FIRST) -> None:
    """Prefetch `count` cache lines from `address` on; memory that is not mapped does no harm."""
    for line in range(count):
        there = _pointer(builder, builder.add(address, I64(LINE * line)))
        _call(builder, "llvm.prefetch.p0", there, I32(0), I32(where), I32(1))
