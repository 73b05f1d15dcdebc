"""A pytest plugin that emulates AMX on CPUs with AVX512_BF16: `-p tests.engine.emulated_tiles`. It says nothing about speed.

The kernels' tile instructions become calls of C functions, which keep the tiles of each thread. Products of bfloat16 add up the first
numbers of pairs and the second ones apart, as Intel documents TDPBF16PS (without its flushing of denormal numbers).
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from llvmlite import ir
from llvmlite.binding import add_symbol
from numba.core import cgutils

from engine.cpu.kernels import amx

SOURCE = r"""
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <stdlib.h>

static __thread struct { uint8_t rows[8]; uint16_t bytes[8]; uint8_t tile[8][16][64]; int shaped; } t;

void ldtilecfg(const uint8_t *shape) {
    if (shape[0] != 1) abort();
    memset(&t, 0, sizeof t);
    t.shaped = 1;
    for (int i = 0; i < 8; i++) {
        t.rows[i] = shape[48 + i];
        memcpy(&t.bytes[i], shape + 16 + 2 * i, 2);
        if (t.rows[i] > 16 || t.bytes[i] > 64) abort();
    }
}
static void need(int i) { if (!t.shaped || i > 7 || !t.rows[i] || !t.bytes[i]) abort(); }
void tilerelease(void) { t.shaped = 0; }
void tilezero(uint8_t i) { need(i); memset(t.tile[i], 0, sizeof t.tile[i]); }
void tileloadd64(uint8_t i, const uint8_t *from, int64_t stride) {
    need(i);
    memset(t.tile[i], 0, sizeof t.tile[i]);
    for (int r = 0; r < t.rows[i]; r++) memcpy(t.tile[i][r], from + r * stride, t.bytes[i]);
}
void tileloaddt164(uint8_t i, const uint8_t *from, int64_t stride) { tileloadd64(i, from, stride); }
void tilestored64(uint8_t i, uint8_t *to, int64_t stride) {
    need(i);
    for (int r = 0; r < t.rows[i]; r++) memcpy(to + r * stride, t.tile[i][r], t.bytes[i]);
}
static float wide(uint16_t half) { uint32_t bits = (uint32_t)half << 16; float f; memcpy(&f, &bits, 4); return f; }
int64_t products;
static void agree(int c, int a, int b) {
    __atomic_add_fetch(&products, 1, __ATOMIC_RELAXED);
    need(c); need(a); need(b);
    if (t.rows[c] != t.rows[a] || t.bytes[c] != t.bytes[b] || t.bytes[a] != 4 * t.rows[b]) abort();
}
void tdpbf16ps(uint8_t c, uint8_t a, uint8_t b) {
    agree(c, a, b);
    for (int m = 0; m < t.rows[c]; m++)
        for (int n = 0; n < t.bytes[c] / 4; n++) {
            float sum, first = 0, second = 0;
            for (int k = 0; k < t.rows[b]; k++) {
                uint16_t x[2], w[2];
                memcpy(x, t.tile[a][m] + 4 * k, 4);
                memcpy(w, t.tile[b][k] + 4 * n, 4);
                first = fmaf(wide(x[0]), wide(w[0]), first);
                second = fmaf(wide(x[1]), wide(w[1]), second);
            }
            memcpy(&sum, t.tile[c][m] + 4 * n, 4);
            sum += first + second;
            memcpy(t.tile[c][m] + 4 * n, &sum, 4);
        }
}
void tdpbusd(uint8_t c, uint8_t a, uint8_t b) {
    agree(c, a, b);
    for (int m = 0; m < t.rows[c]; m++)
        for (int n = 0; n < t.bytes[c] / 4; n++) {
            int32_t sum;
            memcpy(&sum, t.tile[c][m] + 4 * n, 4);
            for (int k = 0; k < 4 * t.rows[b]; k++)
                sum += t.tile[a][m][k] * (int8_t)t.tile[b][k / 4][4 * n + k % 4];
            memcpy(t.tile[c][m] + 4 * n, &sum, 4);
        }
}
"""
PREFIX, NAMES = "llvm.x86.", (
    "ldtilecfg", "tilerelease", "tilezero", "tileloadd64", "tileloaddt164", "tilestored64", "tdpbf16ps", "tdpbusd",
)  # fmt: skip


def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "tiles.c"), Path(folder, "tiles.so")
        source.write_text(SOURCE)
        subprocess.run(["cc", "-O2", "-mfma", "-shared", "-fPIC", "-o", str(made), str(source), "-lm"], check=True)
        return ctypes.CDLL(str(made))


def install(library: ctypes.CDLL) -> None:
    """Make this process emulate the tiles. Call it before kernels are imported, and with a cache of kernels of its own."""
    for name in NAMES:
        add_symbol(f"emulated_{name}", ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    real = amx._call

    def call(builder: Any, name: str, *arguments: Any) -> None:
        short = name.removeprefix(PREFIX)
        if short not in NAMES:
            real(builder, name, *arguments)
            return
        signature = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
        builder.call(cgutils.get_or_insert_function(builder.module, signature, f"emulated_{short}"), arguments)

    amx._call = call
    amx.has_tiles = lambda: True


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"products of tiles: {ctypes.c_int64.in_dll(library, 'products').value}")


library = _library()
install(library)
