"""What a run has measured, and the questions that shapes ask it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from loadtests.figures import StageFigures, failures, median, percentile, ratio, stage_figures
from loadtests.plan import ALONE, ENGINE, Plan
from loadtests.residue import Observation, slope_mib_per_min
from loadtests.samples import Outcome, Sample, Window, of_window

if TYPE_CHECKING:
    from collections.abc import Iterable

RECOVERED_TIMES = 5.0
"""An answer is in time again if its TTFT is at most this multiple of the p95 of one user alone."""


@dataclass
class Measured:
    """The samples in the order of their times, the windows of the stages that took place, and what was observed of the server."""

    plan: Plan
    samples: list[Sample]
    windows: list[Window]
    observations: list[Observation] = field(default_factory=list)
    start_s: float | None = None

    def window(self, name: str) -> Window | None:
        """Of a stage; None if the run did not get there."""
        return next((window for window in self.windows if window.stage == name), None)

    def samples_of(self, name: str) -> list[Sample]:
        """What was sent in a stage."""
        window = self.window(name)
        return of_window(self.samples, window) if window else []

    def stage(self, name: str, user: str = "") -> StageFigures:
        """The figures of a stage, of one class of users if it is named. A stage that did not take place has no figures."""
        samples = [sample for sample in self.samples if not user or sample.user == user]
        return stage_figures(samples, self.window(name) or Window(name, 0.0, 0.0, 0))

    def against_calibration(self, name: str) -> dict[str, float | None]:
        """Throughput and waiting of a stage, as ratios to the engine's own rate and to one user alone."""
        loaded, before = self.stage(name), self.stage(ALONE)
        return {
            "throughput_share": ratio(loaded.tokens_per_s, self.stage(ENGINE).tokens_per_s),
            "ttft_p95_multiple": ratio(loaded.ttft_p95_ms, before.ttft_p50_ms),
            "gap_p95_multiple": ratio(loaded.gap_p95_ms, before.gap_mean_ms),
        }

    def failures(self) -> float:
        """Of all stages. Without a single request everything has failed."""
        if not self.samples:
            return 1.0
        return float(sum(len(self.failures_of(window.stage)) for window in self.windows))

    def failures_of(self, name: str) -> list[Sample]:
        """Of one stage, by what it allows."""
        return failures(self.samples_of(name), self.plan.stage(name).may_refuse)

    def arrivals_share(self, stages: Iterable[str]) -> float | None:
        """The requests that were sent in open loops, as a share of those that were to be sent: whether Locust kept pace."""
        sent = planned = 0.0
        for name in stages:
            stage, window = self.plan.stage(name), self.window(name)
            if window is not None:
                planned += stage.times * self.stage(stage.times_of).answers_per_s * window.seconds
                sent += len(self.samples_of(name))
        return ratio(sent, planned)

    def missing(self, name: str) -> int:
        """Users of a stage of one request each that have no sample."""
        return max(0, self.plan.stage(name).users - len(self.samples_of(name)))

    def refusals(self, name: str) -> tuple[float | None, float]:
        """The p95 of their times, and how many did not say when to come back."""
        refused = [sample for sample in self.samples_of(name) if sample.outcome is Outcome.REFUSED]
        return percentile([sample.total_ms for sample in refused], 0.95), float(sum(not s.told_when for s in refused))

    def recovery_s(self, flood: str, after: str) -> float | None:
        """Seconds from the end of a flood to the first request from which on all were answered in time; None if none was."""
        end, before, probes = self.window(flood), self.stage(ALONE).ttft_p95_ms, self.samples_of(after)
        if end is None or before is None:
            return None
        found = None
        for probe in probes:
            in_time = probe.ttft_ms is not None and probe.ttft_ms <= RECOVERED_TIMES * before
            if probe.outcome is not Outcome.OK or not in_time:
                found = None
            elif found is None:
                found = probe
        return max(0.0, found.at_s - end.end_s) if found else None

    def ttft_of_turn(self, name: str, turn: int) -> float | None:
        """The median of a turn of conversations."""
        return median([s.ttft_ms for s in self.samples_of(name) if s.turn == turn and s.ttft_ms is not None])

    def residue(self, before: str, during: str, after: str) -> dict[str, float | None]:
        """What a soak has left: differences of idle servers, and the slope of memory in the second half of the load."""
        start, end = self._last(before), self._last(after)
        loaded = self._observed(during)
        second_half = loaded[len(loaded) // 2 :]
        if start is None or end is None or not second_half:
            return dict.fromkeys(
                (
                    "rss_slope_mib_per_min",
                    "descriptors_left",
                    "threads_left",
                    "tasks_left",
                    "kv_usage_left",
                    "gauges_left",
                )
            )
        slopes = [slope_mib_per_min(second_half, pid) for pid in second_half[-1].rss_mib]
        known = [slope for slope in slopes if slope is not None]
        return {
            "rss_slope_mib_per_min": max(0.0, *known) if known else None,
            "descriptors_left": max(0.0, float(end.descriptors - start.descriptors)),
            "threads_left": max(0.0, float(end.threads - start.threads)),
            "tasks_left": max(0.0, end.tasks - start.tasks)
            if end.tasks is not None and start.tasks is not None
            else None,
            "kv_usage_left": end.kv_usage,
            "gauges_left": end.gauges,
        }

    def _observed(self, name: str) -> list[Observation]:
        window = self.window(name)
        return [o for o in self.observations if window and window.begin_s <= o.at_s <= window.end_s]

    def _last(self, name: str) -> Observation | None:
        """The last one of an idle stage, of those for which the server's own figures could be read."""
        return next((o for o in reversed(self._observed(name)) if o.gauges is not None), None)


def curve(run: Measured) -> list[StageFigures]:
    """The stages of streams in a closed loop, by users: tokens/s of the system against those of a user."""
    names = [stage.name for stage in run.plan.stages if stage.name == ALONE or stage.name.startswith("users-")]
    found = [run.stage(name) for name in names if run.window(name)]
    return sorted(found, key=lambda stage: stage.users)


def knee(stages: list[StageFigures], gain: float = 1.1) -> int | None:
    """The users after which a next step gives less than a tenth more tokens/s; the most users if there is no such step."""
    for stage, following in pairwise(stages):
        if following.tokens_per_s < gain * stage.tokens_per_s:
            return stage.users
    return stages[-1].users if stages else None
