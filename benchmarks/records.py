"""What a measurement leaves: JSON lines, each with all that is needed to read it alone. Lines are only ever appended."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from pathlib import Path

import msgspec

from benchmarks.accounting import Usage
from benchmarks.client import Answer
from benchmarks.machine import Machine

GOOD_TTFT_S, GOOD_GAP_S = 2.0, 0.15


class Context(msgspec.Struct, frozen=True):
    """What figures must share to be put together."""

    machine: Machine
    commit: str
    dtype: str
    threads: int
    shape: str
    quantization: str = "none"


class Figures(msgspec.Struct, frozen=True):
    """What clients saw. Percentiles are over requests (TTFT) and over all gaps between pieces of text."""

    requests: int
    output_tokens: int
    tokens_per_s: float
    user_tokens_per_s: float | None
    """Median over requests of the speed after the first token; None if answers came in one piece."""
    ttft_p50_ms: float
    ttft_p95_ms: float
    gap_p50_ms: float
    gap_p95_ms: float
    gap_longest_ms: float
    good_requests: int
    """First token within 2 s and no gap over 150 ms."""


class Started(msgspec.Struct, frozen=True, tag="started", tag_field="kind"):
    """A server became ready. `held`: it uses the CPU without requests, and is stopped while others are measured."""

    context: Context
    server: str
    date: str
    versions: dict[str, str]
    command: str
    start_s: float
    idle_cores: float
    held: bool


class Run(msgspec.Struct, frozen=True, tag="run", tag_field="kind"):
    """One case on one server. A disturbed run is repeated, as another attempt of its round."""

    context: Context
    server: str
    date: str
    versions: dict[str, str]
    case: str
    work: str
    users: int
    in_curve: bool
    round: int
    attempt: int
    seed: int
    disturbed: bool
    figures: Figures
    usage: Usage


class Failed(msgspec.Struct, frozen=True, tag="failed", tag_field="kind"):
    """Something was not measured. `case` is empty if the server itself could not be had."""

    context: Context
    server: str
    date: str
    stage: str
    text: str
    case: str = ""
    round: int = -1


Record = Started | Run | Failed
_DECODER: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


class Results:
    """A file of records."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        whole = b"".join(_lines(path))
        if len(whole) < path.stat().st_size:
            path.write_bytes(whole)
        self.records = read([path])

    def add(self, record: Record) -> None:
        """Append it; it is in the file when this returns."""
        self.records.append(record)
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")

    def runs(self, context: Context, server: str, case: str, work: str, round_: int) -> list[Run]:
        """The attempts at one run."""
        wanted = (context, server, case, work, round_)
        every = (record for record in self.records if isinstance(record, Run))
        return [run for run in every if (run.context, run.server, run.case, run.work, run.round) == wanted]


def read(paths: Iterable[Path]) -> list[Record]:
    """All records of the files."""
    return [_DECODER.decode(line) for path in paths for line in _lines(path)]


def _lines(path: Path) -> list[bytes]:
    """A last line that was cut off, because its writer was killed, is none."""
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def figures(answers: list[Answer], wall_s: float) -> Figures:
    """The figures of a run."""
    first = [answer.ttft_s * 1e3 for answer in answers]
    gaps = [gap * 1e3 for answer in answers for gap in answer.gaps_s] or [0.0]
    speeds = [speed for answer in answers if (speed := answer.tokens_per_s) is not None]
    tokens = sum(answer.tokens for answer in answers)
    return Figures(
        requests=len(answers),
        output_tokens=tokens,
        tokens_per_s=tokens / wall_s,
        user_tokens_per_s=statistics.median(speeds) if speeds else None,
        ttft_p50_ms=statistics.median(first),
        ttft_p95_ms=percentile(first, 0.95),
        gap_p50_ms=statistics.median(gaps),
        gap_p95_ms=percentile(gaps, 0.95),
        gap_longest_ms=max(gaps),
        good_requests=sum(is_good(answer) for answer in answers),
    )


def is_good(answer: Answer) -> bool:
    """Whether its reader had to wait neither for the beginning nor in between."""
    return answer.ttft_s <= GOOD_TTFT_S and max(answer.gaps_s, default=0.0) <= GOOD_GAP_S


def percentile(values: list[float], share: float) -> float:
    """The nearest-rank percentile of some values, for `share` in [0, 1]."""
    # Less a little, because a share such as 0.07 is no binary fraction.
    rank = math.ceil(share * len(values) - 1e-9)
    return sorted(values)[max(rank, 1) - 1]
