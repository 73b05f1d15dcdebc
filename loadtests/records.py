"""What a run leaves: one JSON file with the samples, the figures, the verdicts, and all that is needed to read it alone."""

from __future__ import annotations

import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from loadtests.figures import StageFigures
from loadtests.machine import Machine, commit, machine
from loadtests.measured import Measured, curve, knee
from loadtests.plan import PROFILES, Plan, Profile
from loadtests.residue import Observation
from loadtests.samples import Sample, Window
from loadtests.settings import RunSettings
from loadtests.shapes import SHAPES
from loadtests.sizes import sized
from loadtests.targets import Verdict, judged

REASONS_SHOWN = 5


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """One shape, run once."""

    shape: str
    profile: str
    date: str
    commit: str
    machine: Machine
    sizes: Profile
    plan: Plan
    stages: list[StageFigures]
    curve: list[StageFigures]
    knee_users: int | None
    figures: dict[str, float | None]
    verdicts: list[Verdict]
    failures: dict[str, int]
    """Why requests failed, and how many did so."""
    samples: list[Sample]
    windows: list[Window]
    observations: list[Observation] = []

    @property
    def met(self) -> bool:
        """Whether every target is."""
        return all(verdict.met for verdict in self.verdicts)

    def write(self, path: Path) -> None:
        """As JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(self))

    def text(self) -> str:
        """What a person reads at the end."""
        lines = [f"\n{self.shape} ({self.profile}), {self.commit}", ""]
        lines.append(
            f"{'stage':<16}{'users':>6}{'requests':>9}{'tok/s':>9}{'tok/s a user':>13}{'TTFT p95':>10}{'gap p95':>9}"
        )
        for stage in self.stages:
            cells = (stage.user_tokens_per_s, stage.ttft_p95_ms, stage.gap_p95_ms)
            speed, ttft, gap = ("-" if value is None else f"{value:.1f}" for value in cells)
            lines.append(
                f"{stage.stage:<16}{stage.users:>6}{stage.requests:>9}{stage.tokens_per_s:>9.0f}{speed:>13}{ttft:>10}{gap:>9}"
            )
        if self.knee_users is not None:
            lines.append(f"the knee is at {self.knee_users} users")
        lines.append("")
        for name, value in self.figures.items():
            if all(verdict.figure != name for verdict in self.verdicts):
                lines.append(f"       {name}: {'not measured' if value is None else f'{value:.4g}'}, no target")
        lines += [f"{verdict.text()}" for verdict in self.verdicts]
        lines += [f"  {count} x {reason}" for reason, count in list(self.failures.items())[:REASONS_SHOWN]]
        return "\n".join(lines)


def make_record(
    run: RunSettings,
    plan: Plan,
    samples: list[Sample],
    windows: list[Window],
    observations: list[Observation],
    targets: dict[str, float],
) -> Record:
    """Compute the figures and compare them with the targets."""
    ordered = sorted(samples, key=lambda sample: sample.at_s)
    start_s = run.local.start_s if run.local else None
    measured = Measured(plan, ordered, windows, observations, start_s)
    figures = SHAPES[run.shape].measure(measured)
    points = curve(measured) if run.shape == "ramp" else []
    failed = Counter(
        f"{window.stage}, {sample.user}: {sample.reason}"
        for window in windows
        for sample in measured.failures_of(window.stage)
    )
    return Record(
        shape=run.shape,
        profile=run.profile,
        date=datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds"),
        commit=commit(),
        machine=machine(),
        sizes=sized(PROFILES[run.profile], run),
        plan=plan,
        stages=[measured.stage(window.stage) for window in windows],
        curve=points,
        knee_users=knee(points),
        figures=figures,
        verdicts=judged(targets, figures),
        failures=dict(failed.most_common()),
        samples=ordered,
        windows=windows,
        observations=observations,
    )


def read_record(path: Path) -> Record:
    """Raises msgspec.DecodeError for a file of another form."""
    return msgspec.json.decode(path.read_bytes(), type=Record)
