"""Made-up runs: samples of known times, and records of them."""

from __future__ import annotations

from loadtests.plan import PROFILES
from loadtests.records import Record, make_record
from loadtests.samples import Outcome, Sample, Window
from loadtests.settings import RunSettings
from loadtests.shapes import SHAPES
from loadtests.sizes import sized

T0 = 1_000_000.0


def sample(at_s: float, *, total_ms: float = 100, ttft_ms: float | None = 10, tokens: int = 10, **facts) -> Sample:
    """A stream of equal gaps, sent `at_s` after the beginning."""
    gaps = [] if ttft_ms is None or tokens < 2 else [(total_ms - ttft_ms) / (tokens - 1)] * (tokens - 1)
    given = {"user": "OpenAICompletionStreamUser", "outcome": Outcome.OK, **facts}
    return Sample(at_s=T0 + at_s, total_ms=total_ms, ttft_ms=ttft_ms, gaps_ms=gaps, tokens=tokens, **given)


def window(stage: str, begin_s: float, end_s: float, users: int = 1) -> Window:
    return Window(stage, T0 + begin_s, T0 + end_s, users)


def ramp(targets: dict[str, float] | None = None, slow: float = 1.0) -> Record:
    """Four users have twice the tokens of one, eight have no more; `slow` stretches all but the calibration."""
    run = RunSettings("ramp", "cpu-small", "targets.toml", users=8)
    plan = SHAPES["ramp"].plan(sized(PROFILES["cpu-small"], run))
    samples, windows, begin = [], [], 0.0
    for stage in plan.stages:
        windows.append(window(stage.name, begin, begin + 10, stage.users))
        if stage.name == "engine":
            samples += [
                sample(begin + i, total_ms=1000, ttft_ms=None, tokens=400, user="EngineUser") for i in range(10)
            ]
        else:
            times = {"warm-up": 1, "alone": 1, "users-2": 1, "users-4": 1, "users-8": 2}[stage.name]
            total_ms = 1000 * times * (1 if stage.name == "alone" else slow)
            for user in range(stage.users):
                at = begin
                while at + total_ms / 1e3 <= begin + 10:
                    samples.append(sample(at + user / 1e6, total_ms=total_ms, ttft_ms=total_ms / 10, tokens=10))
                    at += total_ms / 1e3
        begin += 10
    return make_record(run, plan, samples, windows, [], targets or {"throughput_share": 0.05})
