"""What a test may cost, on cores of several speeds."""

from __future__ import annotations

import pytest

from tests.cpu_time import ALIKE, YARDSTICK_S, Costs, on_known_core


@pytest.mark.parametrize(("slower", "judged_s"), [
    (0.5, 6.0),
    (1.0, 6.0),
    (ALIKE, 6.0 / ALIKE),
    (1.2, 6.0 / 1.2 / 2),
    (3.0, 1.0),
])  # fmt: skip
def test_costs_on_other_cores(slower, judged_s):
    assert on_known_core(6.0, YARDSTICK_S * slower) == pytest.approx(judged_s)


def test_a_cost_on_a_machine_with_too_much_to_do_is_an_estimate():
    assert on_known_core(6.0, YARDSTICK_S, crowded=True) == 3.0


@pytest.mark.parametrize(("test", "excused", "fails"), [
    ("tests/a.py::test_a", "", True),
    ("tests/a.py::test_a", "compiled kernels", False),
    ("tests/clients/test_gateways.py::test_litellm", "", False),
])  # fmt: skip
def test_what_fails_a_run(test, excused, fails):
    costs = Costs(limited=True)
    report = pytest.TestReport(test, ("", 0, ""), {}, "passed", None, "teardown")
    report.user_properties = [("cpu_s", 6.0), ("judged_s", 6.0), ("excused", excused)]
    costs.pytest_runtest_logreport(report)
    assert (costs.excessive == [test]) is fails
