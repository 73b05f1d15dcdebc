"""A deployment under a fake clock: workers that need 30 s to start and complete 1 request per second.

TTFT is 0.1 / (1 - load) seconds, and 5 s where the load is 1 or more. `tools.docs.autoscale_table` and the tests run loads
through it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from management.autoscale.config import ScalingConfig
from management.autoscale.cost import current_price
from management.autoscale.decision import (
    Abort,
    Decision,
    DeploymentState,
    Drain,
    Kill,
    Outcome,
    Prepare,
    Promote,
    Rule,
    Start,
)
from management.autoscale.memory import Memory
from management.autoscale.observation import Observation, WorkerState, WorkerView
from management.autoscale.policy import tick
from management.autoscale.signals import History, LoadGauges, LoadSlice

Load = Callable[[float], float]
START_UP_S = 30.0
OVERLOADED_TTFT_S = 5.0
IDLE_TTFT_S = 0.1


@dataclass(frozen=True)
class Event:
    """A decision, or a worker that became ready (`rule` is None), with the number of workers after it."""

    at: float
    rule: Rule | None
    workers: int


@dataclass
class Simulation:
    """One deployment and its load, in requests per second at a time in seconds."""

    config: ScalingConfig
    load: Load
    start_up_s: float = START_UP_S
    capacity: int | None = None
    unit_price: float | None = 0.0
    processes: int = 1
    now: float = 0.0
    workers: dict[str, WorkerView] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    generation: int = 1
    asked: int | None = None
    stopped: bool = False
    force: bool = False
    deleting: bool = False
    starts_work: bool = True
    reports: bool = True
    held: int = 0
    waiting: int = 0
    running: int = 0
    crashed: tuple[str, ...] = ()
    events: list[Event] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    outcome: Outcome | None = None
    _due: float = 0.0
    _launched: int = 0
    _last_arrival: float | None = None

    def __post_init__(self) -> None:
        self.history = History(self.config.history_s)

    def count(self, *states: WorkerState) -> int:
        """The workers in one of these states."""
        return sum(worker.state in states for worker in self.workers.values())

    @property
    def live(self) -> int:
        """The workers that serve or start."""
        return self.count(WorkerState.STARTING, WorkerState.READY)

    @property
    def state(self) -> DeploymentState:
        """The deployment's state after the last tick."""
        assert self.outcome is not None
        return self.outcome.state

    @property
    def price(self) -> float:
        """The price of all workers per hour."""
        return current_price(self.workers.values())

    def run(self, until: float) -> Simulation:
        """Tick until a time, exclusive."""
        for _ in self.ticks(until):
            pass
        return self

    def ticks(self, until: float) -> Iterator[Outcome]:
        """The outcome of each tick until a time, exclusive."""
        while self.now < until:
            yield self.step()

    def step(self) -> Outcome:
        """One tick: finish starts, serve the load, report it, decide, act."""
        self._finish_starts()
        self._serve()
        observation = Observation(
            now=self.now,
            workers=tuple(self.workers.values()),
            generation=self.generation,
            asked=self.asked,
            stopped=self.stopped,
            force=self.force,
            deleting=self.deleting,
            crashed=self.crashed,
            capacity=self.capacity,
            unit_price=self.unit_price,
        )
        outcome = tick(self.memory, self.config, observation, self.history)
        self.memory, self.outcome, self.crashed = outcome.memory, outcome, ()
        self._act(outcome)
        self.now += self.config.tick_s
        return outcome

    def crash(self, key: str) -> None:
        """A worker dies."""
        del self.workers[key]
        self.crashed += (key,)

    def act(self, asked: int | None = None, stopped: bool = False, force: bool = False) -> None:
        """A person starts, scales or stops the deployment."""
        self.asked, self.stopped, self.force = asked, stopped, force
        self.generation += 1

    def update(self, **changes: object) -> None:
        """A person changes the configuration."""
        self.config = msgspec.structs.replace(self.config, **changes)
        self.history.retention_s = self.config.history_s
        self.act()

    def _finish_starts(self) -> None:
        for worker in list(self.workers.values()):
            started = self.now - worker.since >= self.start_up_s
            if worker.state is WorkerState.STARTING and started and self.starts_work:
                self._put(worker, WorkerState.READY)
                self.events.append(Event(self.now, None, self.live))

    def _serve(self) -> None:
        rate = self.load(self.now)
        self._due += rate * self.config.tick_s
        arrivals = math.floor(self._due + 1e-9)
        self._due -= arrivals
        if arrivals:
            self._last_arrival = self.now
        ready = self.count(WorkerState.READY)
        self.held = 0 if ready else self.held + arrivals
        if self.reports:
            self._report(arrivals, ttft_s(rate, ready) if ready else None)

    def _report(self, arrivals: int, ttft: float | None) -> None:
        for process in range(self.processes):
            share = arrivals // self.processes + (process < arrivals % self.processes)
            served = share if ttft is not None else 0
            total_s = served * (ttft or 0.0)
            piece = LoadSlice(self.now, share, 0, served, total_s, served, total_s + served)
            is_first = process == 0
            gauges = LoadGauges(
                running=self.running if is_first else 0,
                waiting=self.waiting if is_first else 0,
                held=self.held if is_first else 0,
                last_activity_at=self._last_arrival,
            )
            self.history.report(f"web-{process}", self.now, (piece,), gauges)

    def _act(self, outcome: Outcome) -> None:
        for decision in outcome.decisions:
            for action in decision.actions:
                match action:
                    case Start(count):
                        for _ in range(count):
                            self._launch(WorkerState.STARTING)
                    case Prepare():
                        self._launch(WorkerState.SPARE)
                    case Promote(key):
                        self._put(self.workers[key], WorkerState.STARTING)
                    case Drain(key):
                        self._put(self.workers[key], WorkerState.DRAINING)
                    case Kill(key) | Abort(key):
                        del self.workers[key]
            self.decisions.append(decision)
            if decision.rule not in (Rule.DRAINED, Rule.SPARE):
                self.events.append(Event(self.now, decision.rule, self.live))

    def _launch(self, state: WorkerState) -> None:
        key = f"worker-{self._launched}"
        self._launched += 1
        price = self.unit_price or 0.0
        self.workers[key] = WorkerView(key, state, self.now, price_per_hour=price, launched_at=self.now)

    def _put(self, worker: WorkerView, state: WorkerState) -> None:
        self.workers[worker.key] = msgspec.structs.replace(worker, state=state, since=self.now)


def ttft_s(rate: float, ready: int) -> float:
    """The time to first token of `rate` requests per second on `ready` workers."""
    load = rate / ready
    return IDLE_TTFT_S / (1 - load) if load < 1 else OVERLOADED_TTFT_S
