"""Measures each deployment's load at the front door, queueing included, for the autoscaler.

A request arrives, has its first token, and ends. Per second and deployment this adds up in a slice; what is unfinished is a
gauge. A request that waited for a first worker is left out of the times to the first token: a cold start is no load.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from engine.failures import FinishReason
from inference.generation.generation import Observer
from management.autoscale.signals import LoadGauges, LoadSlice
from management.load import DeploymentLoad, LoadReport

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from inference.generation.generation import Generation
    from inference.workers.holding import HoldQueue
    from inference.workers.router import EngineRouter
    from inference.workers.target import Target

KEPT_SLICES = 30
"""Seconds that a report repeats; a reader that reads more often misses none."""
FORGOTTEN_AFTER_S = 60.0
"""A deployment that has gone is reported for so long after its last request, in which everybody has read its last second."""
MAX_AGES = 256


@dataclass(slots=True)
class _Request:
    """An unfinished request of one deployment."""

    deployment: str
    arrived: float
    cold: bool
    has_token: bool = False


@dataclass(slots=True)
class _Second:
    """The sums of the present second."""

    arrivals: int = 0
    rejected: int = 0
    first_tokens: int = 0
    ttft_total_s: float = 0.0
    completions: int = 0
    e2e_total_s: float = 0.0


@dataclass(slots=True)
class _Load:
    """One deployment."""

    now: _Second = field(default_factory=_Second)
    slices: deque[LoadSlice] = field(default_factory=lambda: deque(maxlen=KEPT_SLICES))
    last_activity_at: float | None = None


class LoadRecorder(Observer):
    """Records generations as an observer, and reports. Thread-safe enough: one thread writes, another reads reports."""

    def __init__(self, process: str, router: EngineRouter, holding: HoldQueue) -> None:
        """`process` names this process among all that report."""
        self._process, self._router, self._holding = process, router, holding
        self._loads: dict[str, _Load] = {}
        self._requests: dict[int, _Request] = {}
        """By id of the generation, or a negative number."""
        self._keys = count(-1, -1)
        self._report = LoadReport(process, time.monotonic(), {})

    def started(self, generation: Generation) -> None:
        """A request is submitted."""
        deployment = generation.target.entry.public_id
        self._requests[id(generation)] = _Request(deployment, generation.timings.arrived, generation.cold)
        self._second(deployment).arrivals += 1

    def first_token(self, generation: Generation) -> None:
        """A request has its first token."""
        request = self._requests.get(id(generation))
        if request is None:
            return
        request.has_token = True
        if not request.cold:
            second = self._second(request.deployment)
            second.first_tokens += 1
            second.ttft_total_s += time.monotonic() - request.arrived

    def finished(
        self, generation: Generation, finish: FinishReason, token_times: list[float], preemptions: int
    ) -> None:
        """A request ended. One that timed out without a token counts with its age; a cancelled one is no completion."""
        request = self._requests.pop(id(generation), None)
        if request is None:
            return
        second, age_s = self._second(request.deployment), time.monotonic() - request.arrived
        if finish in (FinishReason.STOP, FinishReason.LENGTH) and not generation.cancelled:
            second.completions += 1
            second.e2e_total_s += age_s
        elif finish is FinishReason.ERROR and generation.timed_out and not request.has_token and not request.cold:
            second.first_tokens += 1
            second.ttft_total_s += age_s

    @contextmanager
    def tracked(self, target: Target, arrived: float) -> Iterator[None]:
        """Count a request for embeddings, which has no tokens."""
        second = self._second(target.entry.public_id)
        second.arrivals += 1
        key = next(self._keys)
        self._requests[key] = _Request(target.entry.public_id, arrived, cold=True, has_token=True)
        try:
            yield
        finally:
            del self._requests[key]
        second = self._second(target.entry.public_id)
        second.completions += 1
        second.e2e_total_s += time.monotonic() - arrived

    def rejected(self, deployment: str) -> None:
        """A request of the deployment was refused because there is no room."""
        self._second(deployment).rejected += 1

    def refresh(self) -> None:
        """Close the present second and make a new report. Call it on the event loop, about once a second."""
        now = time.monotonic()
        waiting: dict[str, list[float]] = {}
        running: dict[str, list[float]] = {}
        counts: dict[str, int] = {}
        for request in self._requests.values():
            running.setdefault(request.deployment, []).append(now - request.arrived)
            if not request.has_token:
                counts[request.deployment] = counts.get(request.deployment, 0) + 1
                if not request.cold:
                    waiting.setdefault(request.deployment, []).append(now - request.arrived)
        workers: dict[str, dict[str, int]] = {}
        queued: dict[str, int] = {}
        served: set[str] = set()
        """Deployments with a worker that takes requests."""
        for target in self._router.targets:
            name, clients = target.entry.public_id, list(target.clients.items())
            workers[name] = {f"{worker.worker_id}/{worker.epoch}": client.inflight for worker, client in clients}
            queued[name] = sum(client.stats.waiting for _, client in clients)
            if target.responsive:
                served.add(name)
        known = {*workers, *(entry.public_id for entry in self._router.deployments)}
        names = {*self._loads, *workers, *self._holding.deployments}
        deployments = {}
        for name in names:
            load = self._loads.setdefault(name, _Load())
            self._close_second(load, now)
            held = self._holding.count(name)
            # Requests whose last worker has left wait for another: they wake a deployment like those that are held.
            at_workers = sum(workers.get(name, {}).values())
            stranded = 0 if name in served else max(0, len(running.get(name, ())) - at_workers)
            if held + stranded:
                load.last_activity_at = now
            # A request without a token may be in its prefill: only the engines know how many are queued.
            queue = min(counts.get(name, 0), queued.get(name, 0))
            gauges = LoadGauges(
                running=max(0, len(running.get(name, ())) - queue - stranded),
                waiting=queue,
                held=held + stranded,
                waiting_ages_s=tuple(sorted(waiting.get(name, ()))[-MAX_AGES:]),
                running_ages_s=tuple(sorted(running.get(name, ()))[-MAX_AGES:]),
                last_activity_at=load.last_activity_at,
            )
            deployments[name] = DeploymentLoad(tuple(load.slices), gauges, workers.get(name, {}))
            active_s = now - (load.last_activity_at or 0.0)
            if name not in known and not held and not running.get(name) and active_s > FORGOTTEN_AFTER_S:
                del self._loads[name]
        self._report = LoadReport(self._process, now, deployments)

    def reports(self) -> Sequence[LoadReport]:
        """The last report of this process."""
        return (self._report,)

    def _second(self, deployment: str) -> _Second:
        load = self._loads.setdefault(deployment, _Load())
        load.last_activity_at = time.monotonic()
        return load.now

    def _close_second(self, load: _Load, now: float) -> None:
        sums = load.now
        if sums != _Second():
            load.slices.append(LoadSlice(at=now, **asdict(sums)))
            load.now = _Second()
