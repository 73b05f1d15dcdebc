"""Tensors that do not fit are refused before an address of theirs is handed to compiled code."""

from __future__ import annotations

import pytest
import torch

from engine.cpu.kernels import checks, ops, paged
from engine.cpu.kernels.int8 import has_int8_dot
from engine.cpu.kernels.tiles import ADD, GATE, WIDEN
from engine.shapes import ShapeError, check_slots

T, IN, OUT = 3, 16, 40
X = torch.ones(T, IN)
WEIGHT = ops.pack_weight(torch.ones(OUT, IN))
WIDE = ops.wide(OUT)


def linear(x=X, weight=WEIGHT, bias=None, out=None, **options):
    ops.linear(x, weight, bias, torch.zeros(T, WIDE) if out is None else out, **options)


def segments(*rows, ranks=4, factors=None, count=T):
    return ops.LoraSegments(torch.tensor([[*row, 0, 0, 0, 0] for row in rows]), ranks, factors, count)


def norm(x=X, weight=None, out=None):
    ops.norm(x, torch.ones(IN) if weight is None else weight, 1e-5, torch.zeros(T, IN) if out is None else out)


def rotate(heads=None, counts=(2, 1), cosines=None, sines=None, norms=None):
    table = torch.ones(T, 8)
    heads = torch.ones(T, 24) if heads is None else heads
    ops.rotate(heads, counts, table if cosines is None else cosines, table if sines is None else sines, norms)


def write(key=(2, T, 8), value=(2, T, 8), slots=T, keys=(4, 2, 8, 16), values=(4, 2, 4, 16), dtype=torch.int64):
    tensors = [torch.ones(shape) for shape in (key, value)]
    paged.write_kv(*tensors, torch.zeros(slots, dtype=dtype), torch.zeros(keys), torch.zeros(values))


def plan(sequence=(0, T, T, [1]), rows=T):
    return paged.AttentionPlan([sequence], 4, 16, rows, num_blocks=4)


def attend(query=(4, T, 8), keys=(4, 2, 8, 16), values=(4, 2, 4, 16), out=(T, 4, 8), sinks=None):
    tensors = [torch.zeros(shape) for shape in (query, keys, values, out)]
    paged.attend(plan(), *tensors, None, None, None, None if sinks is None else torch.zeros(sinks))


def test_what_fits():
    linear()
    linear(out=torch.zeros(T, WIDE), ending=ADD, bias=torch.zeros(WIDE))
    segments((0, 1, 0, 0), (1, 2, 0, 4))
    norm()
    rotate()
    write()
    attend()
    check_slots(torch.tensor([0, 15]), 16)


@pytest.mark.parametrize(
    "call",
    [
        lambda: linear(x=torch.ones(T, IN + 2)),
        lambda: linear(x=torch.ones(IN, T).t()),
        lambda: linear(x=X.half()),
        lambda: linear(out=torch.zeros(T - 1, WIDE)),
        lambda: linear(out=torch.zeros(T, OUT)),
        lambda: linear(out=torch.zeros(T, WIDE).half()),
        lambda: linear(out=torch.zeros(WIDE, T).t()),
        lambda: linear(bias=torch.zeros(OUT)),
        lambda: linear(bias=torch.zeros(WIDE).half()),
        lambda: linear(x=X.half(), weight=ops.pack_weight(torch.ones(OUT, IN).half()),
                       out=torch.zeros(T, WIDE).half(), ending=WIDEN),
        lambda: linear(out=torch.zeros(T, WIDE // 2 - 1), ending=GATE),
        lambda: linear(lora=segments((0, 2, 0, 4), count=2)),
        lambda: segments((0, 1, 0, 4), (2, 1, 0, 4)),
        lambda: segments((0, 2, 0, 4)),
        lambda: segments((0, 4, 0, 4)),
        lambda: segments((0, T, 0, 5)),
        lambda: segments((0, T, 0, 4), factors=torch.zeros(T - 1, dtype=torch.int64)),
        lambda: norm(weight=torch.ones(IN - 1)),
        lambda: norm(weight=torch.ones(IN).half()),
        lambda: norm(x=X.half()),
        lambda: norm(out=torch.zeros(T - 1, IN)),
        lambda: norm(out=torch.zeros(T, IN - 1)),
        lambda: rotate(heads=torch.ones(T, 23)),
        lambda: rotate(heads=torch.ones(T + 1, 24)),
        lambda: rotate(counts=(3, 1)),
        lambda: rotate(sines=torch.ones(T, 6)),
        lambda: rotate(cosines=torch.ones(T, 8).half()),
        lambda: rotate(norms=(torch.ones(7), torch.ones(8), 1e-5)),
        lambda: write(key=(2, T + 6, 8), value=(2, T + 6, 8)),
        lambda: write(key=(2, T, 8), value=(2, T + 1, 8)),
        lambda: write(key=(4, T, 8), value=(4, T, 8)),
        lambda: write(key=(2, T, 9), value=(2, T, 9)),
        lambda: write(value=(2, T, 17)),
        lambda: write(slots=T - 1),
        lambda: write(dtype=torch.int32),
        lambda: write(values=(3, 2, 4, 16)),
        lambda: plan((0, T, T, [4])),
        lambda: plan((0, T, T, [-1])),
        lambda: plan((0, T, 5, [1])),
        lambda: plan((1, T, T, [1])),
        lambda: plan((0, T, T - 1, [1])),
        lambda: plan((0, 0, T, [1])),
        lambda: attend(query=(4, T + 1, 8)),
        lambda: attend(query=(3, T, 8), out=(T, 3, 8)),
        lambda: attend(query=(4, T, 16)),
        lambda: attend(out=(T, 4, 17)),
        lambda: attend(out=(T - 1, 4, 8)),
        lambda: attend(keys=(3, 2, 8, 16)),
        lambda: attend(sinks=3),
        lambda: check_slots(torch.tensor([0, 16]), 16),
        lambda: check_slots(torch.tensor([-1, 3]), 16),
        lambda: check_slots(torch.tensor([1, 3], dtype=torch.int32), 16),
        lambda: ops.choose(torch.zeros(2, 5), [0.0], [0.0, 0.0]),
        lambda: ops.choose(torch.zeros(2, 5), [0.0, 0.0], [0.0]),
        lambda: ops.select(torch.zeros(2, 5), [1.0], 2),
        lambda: ops.select(torch.zeros(2, 5), [1.0, 1.0], 0),
    ],
)  # fmt: skip
def test_what_does_not_fit(call):
    with pytest.raises(ShapeError):
        call()


@pytest.mark.skipif(not has_int8_dot(), reason="this CPU has no dot products of bytes")
def test_bytes():
    weight = ops.quantise(torch.ones(OUT, IN))
    ops.linear_int8(X, weight, None, torch.zeros(T, WIDE))
    for x, out in ((torch.ones(T, 2 * IN), torch.zeros(T, WIDE)), (X, torch.zeros(T, OUT)), (X, torch.zeros(2, WIDE))):
        with pytest.raises(ShapeError):
            ops.linear_int8(x, weight, None, out)


def test_what_follows_from_the_rows_is_asked_once_and_only_if_it_held():
    passed = set()
    x, weight, narrow = torch.zeros(2, 8), torch.ones(8), torch.zeros(2, 4)
    for _ in range(2):
        with pytest.raises(ShapeError), checks.known_after_once(passed, (2, 1)):
            checks.check_norm(x, weight, narrow)
    with checks.known_after_once(passed, (2, 1)):
        checks.check_norm(x, weight, x)
    with checks.known_after_once(passed, (2, 1)):
        checks.check_norm(x, weight, narrow)
    for others in (passed, None):
        with pytest.raises(ShapeError), checks.known_after_once(others, (3, 1)):
            checks.check_norm(x, weight, narrow)
    with pytest.raises(ShapeError):
        checks.check_norm(x, weight, narrow)


def test_what_is_known_of_shapes_does_not_grow_for_ever(monkeypatch):
    monkeypatch.setattr(checks, "MOST_SIGNATURES", 3)
    passed = set()
    for rows in range(8):
        with checks.known_after_once(passed, (rows,)):
            assert not checks.known()
        with checks.known_after_once(passed, (rows,)):
            assert checks.known()
        assert len(passed) <= 3
