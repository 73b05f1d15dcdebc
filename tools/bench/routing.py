"""Compares ways to choose a worker, on conversations of several turns: this router, round robin, and fewest requests.

    python -m tools.bench.routing [--workers 3] [--conversations 60] [--seed 0]

Workers are simulated, with the engine's own block pool as their prefix cache and a clock of their own; no model runs.
A step takes 10 ms, 0.1 ms for a prompt's token and 0.5 ms for a sequence. `imbalance` is the busiest worker's share of the
requests over an equal share. The second table has one worker that takes ten times as long; the third, where bursts of
24 equal requests land.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from engine.block_pool import BlockPool
from engine.failures import FinishReason
from engine.messages import RequestOutput, Stats
from engine.request import Request
from engine.sampling.params import SamplingParams
from inference.workers.routing.balancer import Balancer
from inference.workers.routing.demand import Demand
from management.snapshot import WorkerEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from inference.workers.routing.assignment import Assignment

BLOCK_SIZE, NUM_BLOCKS, BUDGET = 16, 2000, 512
CHECK_EVERY_S = 0.25
POLICIES = ("this router", "round robin", "fewest requests")


@dataclass(eq=False)
class Job:
    """One request: its prompt, the length of its answer, and what came of it. Times are simulated seconds."""

    prompt: list[int]
    length: int
    sent: float
    ended: Callable[[Job, float], None]
    number: int
    request: Request
    assignment: Assignment | None = None
    worker: int = 0
    prefilled: int = 0
    cached: int = 0
    produced: int = 0
    first: float = 0.0


@dataclass(eq=False)
class Client:
    """What the balancer reads of an EngineClient."""

    number: int
    model: SimpleNamespace
    stats: Stats = field(default_factory=Stats)
    usable: bool = True
    suspect: bool = False


@dataclass(eq=False)
class Worker:
    """A simulated worker: one token budget, prompts in order of arrival, a real prefix cache."""

    slowness: float = 1.0
    pool: BlockPool = field(default_factory=lambda: BlockPool(NUM_BLOCKS, BLOCK_SIZE))
    waiting: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    stepping: bool = False
    stats: Stats = field(default_factory=Stats)

    def admit(self) -> None:
        """Start waiting jobs while blocks are free."""
        while self.waiting:
            job = self.waiting[0]
            self.pool.extend_hashes(job.request)
            hit = self.pool.match(job.request.block_hashes)[: (len(job.prompt) - 1) // BLOCK_SIZE]
            needed = -(-(len(job.prompt) + job.length) // BLOCK_SIZE) - len(hit)
            if needed > self.pool.num_free_after(hit):
                return
            self.pool.touch(hit)
            job.request.block_table = list(hit)
            self.pool.allocate(job.request, len(job.prompt) + job.length)
            job.cached = job.prefilled = len(hit) * BLOCK_SIZE
            self.running.append(self.waiting.pop(0))

    def step(self) -> tuple[float, list[Job]]:
        """One step: how long it takes, and the jobs that got a token."""
        self.admit()
        advanced = [job for job in self.running if job.prefilled == len(job.prompt)]
        budget = BUDGET - len(advanced)
        prompt_tokens = 0
        for job in self.running:
            take = min(budget - prompt_tokens, len(job.prompt) - job.prefilled)
            if take <= 0:
                continue
            job.prefilled += take
            prompt_tokens += take
            self.pool.cache(job.request, job.prefilled)
            if job.prefilled == len(job.prompt):
                advanced.append(job)
        seconds = (0.01 + 1e-4 * prompt_tokens + 5e-4 * len(advanced)) * self.slowness
        stats = self.stats
        self.stats = Stats(steps=stats.steps + 1, prefill_steps=stats.prefill_steps + bool(prompt_tokens))
        return seconds, advanced


class Simulation:
    """Workers, one policy, and a clock that jumps from event to event."""

    def __init__(self, policy: str, workers: list[Worker], seed: int) -> None:
        self.policy, self.workers, self.now = policy, workers, 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self._next = itertools.count(), itertools.cycle(range(len(workers)))
        self.balancer = Balancer(lambda: self.now, random.Random(seed))
        model = SimpleNamespace(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_adapter_rank=0)
        entries = [WorkerEntry(f"w{n}", 1, "") for n in range(len(workers))]
        self.clients: dict[WorkerEntry, Any] = {entry: Client(n, model) for n, entry in enumerate(entries)}
        self.entries, self.jobs = entries, list[Job]()

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Call `action` then."""
        heapq.heappush(self._events, (when, next(self._order), action))

    def run(self) -> None:
        """Until nothing is left to happen."""
        self.at(CHECK_EVERY_S, self._check)
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()

    def send(self, prompt: list[int], length: int, ended: Callable[[Job, float], None]) -> None:
        """A client's request, now."""
        number = len(self.jobs)
        request = Request((0, number), list(prompt), SamplingParams(max_tokens=length), self.now)
        job = Job(prompt, length, self.now, ended, number, request)
        self.jobs.append(job)
        if self.policy == "this router":
            job.assignment = self.balancer.assign(self.clients, Demand(prompt, 512))
            if job.assignment is None:
                raise RuntimeError("no worker can be used")
            job.worker = next(c.number for c in self.clients.values() if c is job.assignment.client)
        elif self.policy == "round robin":
            job.worker = next(self._next)
        else:
            job.worker = min(range(len(self.workers)), key=lambda n: self._held(n))
        self.workers[job.worker].waiting.append(job)
        self._begin(job.worker)

    def _held(self, number: int) -> int:
        return len(self.workers[number].waiting) + len(self.workers[number].running)

    def _check(self) -> None:
        if self.policy == "this router":
            self.balancer.eject_slow(self.clients)
        if self._events:
            self.at(self.now + CHECK_EVERY_S, self._check)

    def _begin(self, number: int) -> None:
        worker = self.workers[number]
        if worker.stepping or not (worker.waiting or worker.running):
            return
        seconds, advanced = worker.step()
        worker.stepping = True
        self.at(self.now + seconds, lambda: self._end(number, advanced))

    def _end(self, number: int, advanced: list[Job]) -> None:
        worker, done = self.workers[number], []
        worker.stepping = False
        for job in advanced:
            job.produced += 1
            job.first = job.first or self.now
            job.request.token_ids.append(job.number)
            if job.produced == job.length:
                done.append(job)
                worker.running.remove(job)
                worker.pool.cache(job.request, len(job.prompt) + job.length - 1)
                worker.pool.free(job.request)
        stats = worker.stats
        stats.running, stats.waiting = len(worker.running), len(worker.waiting)
        stats.blocks_total, stats.blocks_used = worker.pool.num_usable, worker.pool.num_usable - worker.pool.num_free
        self.clients[self.entries[number]].stats = stats
        self.balancer.record(self.entries[number]).reported(stats, stats.running + stats.waiting)
        for job in advanced:
            if job.assignment is not None:
                finish = FinishReason.STOP if job in done else None
                job.assignment.note(RequestOutput(0, token_ids=[job.number], finish_reason=finish))
        for job in done:
            job.ended(job, self.now)
        self._begin(number)


def converse(simulation: Simulation, count: int, seed: int) -> None:
    """Conversations of 3 to 8 turns, after one of four system prompts of 400 tokens."""
    source = random.Random(seed)

    def words(length: int) -> list[int]:
        return [source.randrange(30_000) for _ in range(length)]

    systems = [words(400) for _ in range(4)]

    def turns(history: list[int]) -> list[tuple[list[int], int, float]]:
        made = []
        for _ in range(source.randint(3, 8)):
            history = history + words(source.randint(20, 300))
            length = source.randint(30, 200)
            made.append((history, length, source.uniform(1, 8)))
            history = history + words(length)  # as the client's template writes the answer
        return made

    def go_on(rest: Iterator[tuple[list[int], int, float]]) -> None:
        turn = next(rest, None)
        if turn is not None:
            prompt, length, pause = turn
            simulation.send(prompt, length, lambda _, now: simulation.at(now + pause, lambda: go_on(rest)))

    start = 0.0
    for _ in range(count):
        start += source.expovariate(4.0)
        simulation.at(start, partial(go_on, iter(turns(source.choice(systems)))))


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of them lie."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def row(policy: str, simulation: Simulation) -> str:
    """A line of the first two tables."""
    jobs = simulation.jobs
    counts = Counter(job.worker for job in jobs)
    imbalance = max(counts.values()) * len(simulation.workers) / len(jobs)
    hits = sum(job.cached for job in jobs) / sum(len(job.prompt) for job in jobs)
    first = [(job.first - job.sent) * 1e3 for job in jobs]
    shares = "/".join(str(counts[n]) for n in range(len(simulation.workers)))
    return (
        f"| {policy} | {shares} | {imbalance:.2f} | {hits:.0%} | {statistics.median(first):.0f} | "
        f"{percentile(first, 0.95):.0f} | {percentile(first, 0.99):.0f} | {simulation.balancer.ejections.total()} |"
    )


def burst(policy: str, workers: int, same: bool, seed: int) -> str:
    """Where 24 equal requests land that arrive before any report."""
    simulation, source = Simulation(policy, [Worker() for _ in range(workers)], seed), random.Random(seed)
    prompt = [source.randrange(30_000) for _ in range(512)]
    for _ in range(24):
        simulation.send(prompt if same else [source.randrange(30_000) for _ in range(512)], 128, lambda *_: None)
    counts = Counter(job.worker for job in simulation.jobs)
    return "/".join(str(counts[n]) for n in range(workers))


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for title, slowest in (("All workers well", 1.0), ("One worker ten times slower", 10.0)):
        print(f"\n{title}:\n")
        print("| policy | requests | imbalance | prefix hits | TTFT p50, ms | p95 | p99 | ejections |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for policy in POLICIES:
            workers = [Worker(slowest if number == 0 else 1.0) for number in range(options.workers)]
            simulation = Simulation(policy, workers, options.seed)
            converse(simulation, options.conversations, options.seed)
            simulation.run()
            print(row(policy, simulation), flush=True)
    print("\n24 equal requests at once:\n\n| policy | one prompt | different prompts |\n| --- | --- | --- |")
    for policy in POLICIES:
        print(
            f"| {policy} | {' | '.join(burst(policy, options.workers, same, options.seed) for same in (True, False))} |"
        )


if __name__ == "__main__":
    main()
