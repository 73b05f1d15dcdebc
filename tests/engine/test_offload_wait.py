"""How long a request waits for blocks that come back: what computing them is expected to take, within bounds."""

from __future__ import annotations

import pytest

from engine.block_pool import BlockPool
from engine.gates.offload import FIRST_WAIT_S, LEAST_WAIT_S, MOST_WAIT_S, OffloadGate
from engine.step_time import StepTime
from tests.unit.engine.test_queue_limits import RATE, measured


@pytest.mark.parametrize(
    ("times", "tokens", "expected_s"),
    [
        (measured(), 400, 400 / RATE),
        (measured(), 1, LEAST_WAIT_S),
        (measured(), 10**9, MOST_WAIT_S),
        (StepTime(), 400, FIRST_WAIT_S),
    ],
)
def test_a_request_waits_as_long_as_computing_takes(times, tokens, expected_s):
    gate = OffloadGate(None, BlockPool(8, 16, True), times, 512)
    assert gate._compute_s(tokens) == pytest.approx(expected_s, rel=0.2)
