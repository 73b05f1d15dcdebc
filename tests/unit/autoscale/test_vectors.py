"""The decisions of five loads, to the second."""

from __future__ import annotations

import pytest

from tests.unit.autoscale.vectors import VECTORS, Vector


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.name)
def test_it_decides_as_the_table_says(vector: Vector) -> None:
    assert tuple(vector.run().events) == vector.events
