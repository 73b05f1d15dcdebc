"""Records as a measurement would write them."""

from __future__ import annotations

from benchmarks.accounting import Usage
from benchmarks.client import Answer
from benchmarks.machine import Machine
from benchmarks.records import Context, Run, figures

MACHINE = Machine("Some Xeon", "6/207", ("amx_bf16",), 2, 24, "Linux")
CONTEXT = Context(MACHINE, "0123456789ab", "bfloat16", 2, "smollm2-135m")


def usage(other: float = 0.0, wall_s: float = 2.0) -> Usage:
    return Usage(wall_s, 3.0, 0.1, other, 0.0, 500.0)


def answers(count: int = 2, tokens: int = 5, gap_s: float = 0.1) -> list[Answer]:
    return [Answer(10.0, [10.5 + gap_s * i for i in range(tokens)], tokens) for _ in range(count)]


def run(
    server: str, case: str = "c1", number: int = 0, speed: float = 5.0, other: float = 0.0, in_curve: bool = True,
    attempt: int = 0, context: Context = CONTEXT,
) -> Run:  # fmt: skip
    """`speed`: tokens per second, of ten tokens."""
    seen = usage(other, wall_s=10 / speed)
    return Run(
        context, server, "2026-01-01T00:00:00+00:00", {"fake": "1"}, case, f"work of {case}", 1, in_curve, number,
        attempt, 1, other > 0.2, figures(answers(), seen.wall_s), seen,
    )  # fmt: skip
