"""What became of each request. Every sample is kept: Locust's own histograms are too coarse for tokens."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from enum import StrEnum
from typing import Any

import msgspec


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    REFUSED = "refused"
    """The server is full, and said so before it began."""
    WRONG = "wrong"
    """An answer without its end, or with another number of tokens than was asked for."""
    ERROR = "error"
    """Another status."""
    LOST = "lost"
    """No answer, or a connection that broke."""


class Sample(msgspec.Struct):
    """One request. `at_s` is the time of sending, in the clock of whoever has collected the sample."""

    at_s: float
    user: str
    """The name of its user's class."""
    outcome: Outcome
    total_ms: float
    ttft_ms: float | None = None
    """To the first token; None for whole answers."""
    gaps_ms: list[float] = []
    """Between pieces of text; a piece may hold several tokens."""
    tokens: int = 0
    status: str = ""
    """HTTP's or gRPC's."""
    told_when: bool = False
    """A refusal said when to try again."""
    turn: int = 0
    """Of a conversation, from 1."""
    reason: str = ""
    """What is wrong, for people."""
    worker: str = ""
    """Locust's name of the worker that has sent it, in a distributed run."""

    @property
    def end_s(self) -> float:
        """When it had ended."""
        return self.at_s + self.total_ms / 1e3

    def tokens_between(self, begin_s: float, end_s: float) -> float:
        """Its tokens in a time, which pieces say of streams; those of whole answers are spread over their time."""
        if self.ttft_ms is None:
            overlap = min(end_s, self.end_s) - max(begin_s, self.at_s)
            return self.tokens * max(0.0, overlap) / max(1e-9, self.total_ms / 1e3)
        times = [self.at_s + self.ttft_ms / 1e3]
        for gap in self.gaps_ms:
            times.append(times[-1] + gap / 1e3)
        return self.tokens * (bisect_left(times, end_s) - bisect_left(times, begin_s)) / len(times)


class Collection:
    """The samples of this process, and on a master those of its workers."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def add(self, sample: Sample) -> None:
        """Keep it."""
        self.samples.append(sample)

    def give(self, data: dict[str, Any]) -> None:
        """Move the samples into a worker's report. They travel with their age, because clocks of machines differ."""
        now = time.time()
        data["samples"] = [msgspec.to_builtins(sample) for sample in self.samples]
        for sample in data["samples"]:
            sample["at_s"] = now - sample["at_s"]
        self.samples = []

    def take(self, data: dict[str, Any], worker: str = "") -> None:
        """Keep the samples of a worker's report, which has just come."""
        now = time.time()
        for sample in msgspec.convert(data.pop("samples", []), list[Sample]):
            sample.at_s, sample.worker = now - sample.at_s, worker
            self.samples.append(sample)


class Window(msgspec.Struct):
    """When a stage took place: from its first user to the beginning of the next stage."""

    stage: str
    begin_s: float
    end_s: float
    users: int

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end_s - self.begin_s


def of_window(samples: list[Sample], window: Window) -> list[Sample]:
    """Those that were sent in it; `samples` are in the order of their times."""
    first = bisect_left(samples, window.begin_s, key=lambda sample: sample.at_s)
    return samples[first : bisect_right(samples, window.end_s, key=lambda sample: sample.at_s)]
