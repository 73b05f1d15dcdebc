"""Products of few rows, and what adapters add to them, against float64."""

from __future__ import annotations

import pytest
import torch

from engine.gpu import low_rank, products

CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def dtypes(device: torch.device) -> list[torch.dtype]:
    """The interpreter multiplies bfloat16 as if it were integers."""
    return [torch.float32, torch.bfloat16 if device.type == "cuda" else torch.float16]


def random(*sizes: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    difference = (found.double() - expected).abs().max() / expected.abs().max()
    assert float(difference) < CLOSE[found.dtype]


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 64, 70])
@pytest.mark.parametrize(("columns", "inner"), [(200, 1024), (64, 512), (200, 1000), (129, 300), (100, 90)])
def test_weights_of_any_shape(columns, inner, rows, device):
    """Whole tiles and parts of tiles; inputs in several parts, and in one."""
    for dtype in dtypes(device):
        x = random(rows, inner + 8, dtype=dtype, device=device)[:, :inner]
        weight, bias = (
            random(columns, inner, dtype=dtype, device=device, seed=1),
            random(columns, dtype=dtype, device=device, seed=2),
        )
        for given in (None, bias):
            expected = x.double() @ weight.double().T + (0 if given is None else bias.double())
            for _ in range(2):  # the first one leaves its tiles' numbers of parts as they were
                assert_close(products.product(x, weight, None, given), expected)


def test_inputs_are_split_where_outputs_are_few(device):
    def parts_of(columns: int, inner: int) -> tuple[int, int]:
        return products.parts_of(torch.empty(columns, inner, dtype=torch.float16, device=device), 1)

    assert parts_of(64, 1024)[0] > 1
    assert parts_of(200, 1000)[0] > 1
    assert parts_of(64 * 400, 1024) == (1, 1024)
    for columns, inner in ((64, 1024), (200, 3584), (896, 4864), (64, 90)):
        parts, each = parts_of(columns, inner)
        assert (parts - 1) * each < inner <= parts * each
        assert each % products.TURN == 0


@pytest.mark.parametrize("bytes_each", [1, 2])
def test_a_row_is_the_same_beside_any_others(bytes_each, device):
    dtype = dtypes(device)[1]
    x = random(60, 1024, dtype=dtype, device=device)
    weight = random(200, 1024, dtype=dtype, device=device, seed=1)
    scales = None
    if bytes_each == 1:
        weight, scales = (weight.float() * 30).clamp(-127, 127).to(torch.int8), torch.rand(200, device=device)
    together = products.product(x, weight, scales, None)
    for first, count in ((7, 1), (3, 16), (20, 40)):
        found = products.product(x[first : first + count], weight, scales, None)
        assert_close(found, together[first : first + count].double())
        if device.type == "cuda":  # the interpreter's sums depend on the shape
            assert torch.equal(found, together[first : first + count])


def test_products_of_many_shapes_share_a_workspace(device):
    """Again and again, each with the same bits."""
    dtype = dtypes(device)[1]
    shapes = [(rows, columns, inner) for rows in (3, 40) for columns, inner in ((64, 1024), (200, 1000), (896, 512))]
    pairs = [(random(rows, inner, dtype=dtype, device=device), random(columns, inner, dtype=dtype, device=device, seed=1))
             for rows, columns, inner in shapes]  # fmt: skip
    first = [products.product(x, weight, None, None) for x, weight in pairs]
    for _ in range(50 if device.type == "cuda" else 1):
        for (x, weight), expected in zip(pairs, first, strict=True):
            assert torch.equal(products.product(x, weight, None, None), expected)


def test_the_products_of_a_model_are_these_for_few_rows(device, monkeypatch):
    monkeypatch.setattr(products, "pays", lambda weight: True)
    layer = products.FewRowsLinear(96, 40, device=device, dtype=torch.float32)
    x = random(3, 96, dtype=torch.float32, device=device)
    with torch.inference_mode():
        assert torch.allclose(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias), atol=1e-5)
        half = layer.half() if device.type == "cpu" else layer.bfloat16()
        for rows in (3, products.MOST_ROWS + 1):
            given = random(rows, 96, dtype=half.weight.dtype, device=device)
            assert_close(half(given), given.double() @ half.weight.double().T + half.bias.double())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of infinite factors, in the interpreter
@pytest.mark.parametrize("rows", [6, 70])
@pytest.mark.parametrize("rank", [4, 16, 40])
@pytest.mark.parametrize("ends", [[300], [200, 300], [100, 200, 300]], ids=len)
def test_each_row_has_its_own_adapter(ends, rank, rows, device):
    """Ranks of one adapter beside smaller ones, inputs in several parts, rows without an adapter, and one adapter and one row that have what is
    no number.
    """
    slots, inner, layers = 3, 2 * low_rank.PART_INNER + 100, len(ends)
    for dtype in dtypes(device):
        x = random(rows, inner, dtype=dtype, device=device)
        a = random(layers, slots, rank, inner, dtype=dtype, device=device, seed=1) / 16
        b = random(slots, rank, ends[-1], dtype=dtype, device=device, seed=2)
        a[:, 0, 3:], b[0, 3:] = 0, 0
        row_slots = torch.tensor([0, 3, 2, 1, 0, 2, 3] * 10, device=device)[:rows]
        out = random(rows, ends[-1], dtype=dtype, device=device, seed=3)
        expected = out.double()
        for row, slot in enumerate(row_slots.tolist()):
            for layer, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
                if slot in (0, 2):
                    expected[row, first:end] += (a[layer, slot].double() @ x[row].double()) @ b[
                        slot, :, first:end
                    ].double()
        a[:, 1], b[1], x[rows - 2] = torch.nan, torch.inf, torch.nan
        ranks = torch.tensor([3, rank, rank], dtype=torch.int32, device=device)
        before = out.clone()
        low_rank.add(x, a.flatten(0, 2), b.flatten(0, 1), row_slots, ranks, ends, out)
        sound = (row_slots == 0) | (row_slots == 2)
        sound[rows - 2] = False
        assert_close(out[sound], expected[sound])
        assert torch.equal(out[row_slots == 3], before[row_slots == 3])
