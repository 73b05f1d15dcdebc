"""The element-wise kernels of a decoder layer: norm and rotary embedding.

The residual stream is float32; inputs and outputs of a product have the model's type.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from engine.cpu.kernels.compiled import kernel
from engine.cpu.kernels.emit import F32
from engine.cpu.kernels.simd import address_of, as_float, load, load_int, store, take_ticket, task_rows

ONE = np.float32(1)


@cache
def norm_kernel(kind: int) -> Any:
    """Root-mean-square norm: out = x / rms(x) * weight.

    Arguments: rows, width; x [rows, width] float32, its stride; weight [width] float32; epsilon; out, its stride.
    """

    @kernel
    def norm(data: Any) -> None:
        a = address_of(data)
        rows, width, x, stride = load_int(a, 2), load_int(a, 3), load_int(a, 4), load_int(a, 5)
        weight, epsilon, out, out_stride = load_int(a, 6), as_float(load_int(a, 7)), load_int(a, 8), load_int(a, 9)
        each = task_rows(rows)
        while True:
            first = take_ticket(a) * each
            if first >= rows:
                return
            for row in range(first, min(rows, first + each)):
                start, target = row * stride, row * out_stride
                squares = np.float32(0)
                for i in range(start, start + width):
                    squares += load(x, i, F32) * load(x, i, F32)
                scale = ONE / np.sqrt(squares / np.float32(width) + epsilon)
                for i in range(width):
                    store(out, target + i, kind, load(x, start + i, F32) * scale * load(weight, i, F32))

    return norm


@cache
def rotary_kernel(kind: int) -> Any:
    """Rotate the query and key heads of each row in place, after their norms where they have any.

    Arguments: rows; heads: address, row stride, query heads, key heads, dim; cosines and sines [rows, dim] float32;
    query norm, key norm [dim] float32 (0: none), epsilon. The halves of a head rotate against each other (GPT-NeoX).
    """

    @kernel
    def rotary(data: Any) -> None:
        a = address_of(data)
        rows, heads, stride, queries, keys, dim = (
            load_int(a, 2), load_int(a, 3), load_int(a, 4), load_int(a, 5), load_int(a, 6), load_int(a, 7),
        )  # fmt: skip
        cosines, sines, query_norm, key_norm = load_int(a, 8), load_int(a, 9), load_int(a, 10), load_int(a, 11)
        epsilon = as_float(load_int(a, 12))
        half = dim // 2
        each = task_rows(rows)
        while True:
            first = take_ticket(a) * each
            if first >= rows:
                return
            for row in range(first, min(rows, first + each)):
                angle = row * dim
                for head in range(queries + keys):
                    start = row * stride + head * dim
                    norm = query_norm if head < queries else key_norm
                    if norm:
                        squares = np.float32(0)
                        for i in range(start, start + dim):
                            squares += load(heads, i, kind) * load(heads, i, kind)
                        scale = ONE / np.sqrt(squares / np.float32(dim) + epsilon)
                        for i in range(dim):
                            store(heads, start + i, kind, load(heads, start + i, kind) * scale * load(norm, i, F32))
                    for i in range(half):
                        x, y = load(heads, start + i, kind), load(heads, start + half + i, kind)
                        turned = x * load(cosines, angle + i, F32) - y * load(sines, angle + i, F32)
                        other = y * load(cosines, angle + half + i, F32) + x * load(sines, angle + half + i, F32)
                        store(heads, start + i, kind, turned)
                        store(heads, start + half + i, kind, other)

    return rotary
