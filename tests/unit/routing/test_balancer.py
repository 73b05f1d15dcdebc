"""Placing requests on workers that only exist as reports: evenness, affinity, ejection."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest
from structlog.testing import capture_logs

from engine.failures import Failure, FailureCode, FinishReason
from engine.messages import ModelInfo, RequestOutput, Stats
from inference.workers.routing.balancer import Balancer
from inference.workers.routing.breaker import FAILURES, OPEN_S
from inference.workers.routing.demand import Demand
from management.snapshot import WorkerEntry
from tests.unit.routing.clock import Clock
from tests.unit.scripts import model_info

FAILED = RequestOutput(0, finish_reason=FinishReason.ERROR, error=Failure(FailureCode.STEP_FAILED))
DONE = RequestOutput(0, finish_reason=FinishReason.STOP)


@dataclass(eq=False)
class Client:
    """What the balancer reads of an EngineClient."""

    model: ModelInfo = field(default_factory=model_info)
    stats: Stats = field(default_factory=Stats)
    usable: bool = True
    suspect: bool = False


class Workers:
    """Workers of one deployment and a process's balancer over them."""

    def __init__(self, count, seed=1):
        self.clock = Clock()
        self.balancer = Balancer(self.clock, Random(seed))
        self.entries = [WorkerEntry(f"demo/{n}", 1, "unix:/nowhere") for n in range(count)]
        self.clients = {entry: Client() for entry in self.entries}

    def place(self, demand):
        assignment = self.balancer.assign(self.clients, demand)
        assert assignment is not None
        return assignment, self.index(assignment)

    def index(self, assignment):
        return list(self.clients.values()).index(assignment.client)

    def report(self, number, **stats):
        """The worker's report; `held` of its requests are this process's."""
        held = stats.pop("held", 0)
        client, entry = self.clients[self.entries[number]], self.entries[number]
        client.stats = Stats(**stats)
        self.balancer.record(entry).reported(client.stats, held)

    def step(self, number, gap_s, count=1):
        for _ in range(count):
            self.clock.pass_s(gap_s)
            self.report(number, steps=self.clients[self.entries[number]].stats.steps + 1, running=1, held=1)


def prompts(kind, count):
    """Equal requests: the same prompt each time, or others of the same length."""
    random = Random(4)
    same = [random.randrange(1000) for _ in range(512)]
    return [same if kind == "same" else [random.randrange(1000) for _ in range(512)] for _ in range(count)]


@pytest.mark.parametrize("kind", ["same", "different"])
@pytest.mark.parametrize(("streams", "workers"), [(24, 3), (8, 2), (40, 5), (6, 3)])
@pytest.mark.parametrize("max_tokens", [128, 2000])
def test_a_burst_without_any_report_is_spread_evenly(kind, streams, workers, max_tokens):
    for seed in range(20):
        placed = Workers(workers, seed)
        counts = Counter(placed.place(Demand(prompt, max_tokens))[1] for prompt in prompts(kind, streams))
        assert all(abs(counts[n] - streams / workers) <= 1 for n in range(workers)), counts


@pytest.mark.parametrize("kind", ["same", "different"])
@pytest.mark.parametrize("spread", [0, 40])
def test_a_closed_loop_stays_even(kind, spread):
    """24 clients send their next request when the last one ends, of 128 tokens and a few more."""
    for seed in range(5):
        placed, random = Workers(3, seed), Random(seed)
        waiting = iter(prompts(kind, 24 * 8))
        running = []
        for _ in range(24):
            assignment, number = placed.place(Demand(next(waiting), 512))
            running.append([assignment, number, 128 + random.randint(0, spread)])
        worst = 0
        for _ in range(700):  # steps of all workers
            for one in running:
                one[2] -= 1
                one[0].note(RequestOutput(0, token_ids=[5], finish_reason=FinishReason.STOP if one[2] <= 0 else None))
            for one in running:
                if one[2] <= 0:
                    assignment, number = placed.place(Demand(next(waiting), 512))
                    one[:] = assignment, number, 128 + random.randint(0, spread)
            counts = Counter(one[1] for one in running)
            worst = max(worst, *(abs(counts[n] - 8) for n in range(3)))
        assert worst <= (1 if spread == 0 else 2)


def test_two_processes_see_each_others_load():
    first, second = Workers(3), Workers(3)
    for _ in range(9):
        first.place(Demand(range(100), 100))
    for number in range(3):
        second.report(number, running=[9, 0, 0][number])
    counts = Counter(second.place(Demand(range(100), 100))[1] for _ in range(6))
    assert counts[0] == 0
    assert {counts[1], counts[2]} <= {2, 3, 4}


def test_two_processes_do_not_all_take_the_same_worker():
    """Each knows of the other only by an old report in which one worker was idle."""
    counts = Counter()
    for seed in range(20):
        process = Workers(8, seed)
        for number in range(8):
            process.report(number, running=0 if number == 7 else 3)
        counts[process.place(Demand(range(100), 100))[1]] += 1
    assert counts[7] < 15


def test_own_requests_in_a_report_count_once():
    placed = Workers(2)
    placed.place(Demand(range(100), 100))
    busy = placed.place(Demand(range(100), 100))[1]
    placed.report(busy, running=1, held=1)
    record = placed.balancer.record(placed.entries[busy])
    assert record.foreign_requests == 0
    placed.report(busy, running=2, waiting=3, held=1)
    assert record.foreign_requests == 4


def test_everything_is_given_back_when_requests_end():
    placed = Workers(2)
    assignments = [placed.place(Demand(range(300), 100, adapter="x"))[0] for _ in range(6)]
    for assignment, end in zip(assignments, ("end", "fail", "leave") * 2, strict=True):
        assignment.note(RequestOutput(0, token_ids=[1, 2]))
        getattr(assignment, end)()
        assignment.leave()
        assignment.note(DONE)
    for entry in placed.entries:
        record = placed.balancer.record(entry)
        assert (record.load, record.inflight, record.unprefilled, dict(record.adapters)) == (0, 0, 0, {})


def test_a_conversation_stays_with_its_worker():
    placed = Workers(3)
    history = list(range(1000))
    first, home = placed.place(Demand(history, 100))
    for turn in range(5):
        placed.place(Demand([7000 + turn] * 500, 100))[0].end()
        first.end()
        history += range(2000 + 100 * turn, 2100 + 100 * turn)
        first, number = placed.place(Demand(history, 100))
        assert number == home


def test_another_tenants_prefix_is_none():
    placed = Workers(2)
    home = placed.place(Demand(range(1000), 1, cache_salt="a"))[1]
    assert placed.place(Demand(range(1000), 1, cache_salt="b"))[1] != home
    assert placed.place(Demand(range(1000), 1, cache_salt="a"))[1] == home


def test_an_adapter_stays_where_it_is():
    placed = Workers(3)
    placed.report(2, adapters=["x"])
    homes = {placed.place(Demand(range(10), 100, adapter="x"))[1] for _ in range(3)}
    assert homes == {2}


def test_a_full_cache_is_avoided():
    placed = Workers(2)
    placed.report(0, blocks_total=1000, blocks_used=990)
    placed.report(1, blocks_total=1000, blocks_used=100)
    for n in range(6):
        assert placed.place(Demand([n] * 320, 10))[1] == 1
    placed.report(1, blocks_total=1000, blocks_used=990)
    placed.place(Demand(range(320), 10))


def test_a_burst_of_long_prompts_counts_before_the_next_report():
    placed = Workers(2)
    placed.report(0, blocks_total=50, blocks_used=0)
    placed.report(1, blocks_total=50, blocks_used=0)
    assert {placed.place(Demand([n] * 480, 10))[1] for n in range(2)} == {0, 1}
    record = placed.balancer.record(placed.entries[0])
    candidate = record.candidate(placed.clients[placed.entries[0]], Demand([9] * 480, 10), [], 0.0)
    assert candidate.free_blocks == 20


def failing(placed, number):
    """Fail all that is placed on a worker until its breaker opens."""
    failures = 0
    while failures < FAILURES:
        assignment, chosen = placed.place(Demand(range(10), 10))
        assignment.note(FAILED if chosen == number else DONE)
        failures += chosen == number


def test_a_failing_worker_is_left_alone_and_comes_back_through_a_probe():
    placed = Workers(3)
    failing(placed, 1)
    assert placed.balancer.ejections == {"failures": 1}
    assignments = [placed.place(Demand(range(10), 10)) for _ in range(12)]
    assert {number for _, number in assignments} == {0, 2}
    placed.clock.pass_s(OPEN_S)
    more = [placed.place(Demand(range(10), 10)) for _ in range(12)]
    (probe,) = [assignment for assignment, number in more if number == 1]
    probe.note(DONE)
    assert 1 in {placed.place(Demand(range(10), 10))[1] for _ in range(12)}


def test_the_only_worker_is_used_whatever_its_breaker_says():
    placed = Workers(1)
    failing(placed, 0)
    assert placed.place(Demand(range(10), 10))[1] == 0


def test_a_refusal_is_no_failure():
    placed = Workers(2)
    for code in (FailureCode.GRAMMAR, FailureCode.OVERLOADED, FailureCode.TOO_LONG, FailureCode.POISONOUS):
        for _ in range(12):
            assignment, _ = placed.place(Demand(range(10), 10))
            assignment.note(RequestOutput(0, finish_reason=FinishReason.ERROR, error=Failure(code)))
    assert not placed.balancer.ejections


def each_step(placed, gaps, count=30):
    """Steps side by side: every worker reports at its own pace."""
    for number, gap_s in gaps.items():
        placed.clock.pass_s(1.0)
        placed.report(number, steps=placed.clients[placed.entries[number]].stats.steps + 1, prefill_steps=1, running=1)
        placed.step(number, gap_s, count)


def test_a_brown_out_is_ejected_by_its_pace():
    placed = Workers(3)
    each_step(placed, {0: 0.03, 1: 0.3, 2: 0.03})
    with capture_logs() as logs:
        placed.balancer.eject_slow(placed.clients)
        placed.balancer.eject_slow(placed.clients)
    assert logs == [
        {"event": "worker ejected", "log_level": "warning", "worker": "demo/1@1", "reason": "latency", "step_ms": 300}
    ]
    assert placed.balancer.ejections == {"latency": 1}
    assert {placed.place(Demand(range(10), 10))[1] for _ in range(12)} == {0, 2}


@pytest.mark.parametrize(("gap_s", "ejections"), [(0.3, 2), (0.03, 1)])
def test_a_probe_shows_whether_it_is_still_slow(gap_s, ejections):
    placed = Workers(3)
    each_step(placed, {0: 0.03, 1: 0.3, 2: 0.03})
    placed.balancer.eject_slow(placed.clients)
    placed.clock.pass_s(OPEN_S)
    running = [placed.place(Demand(range(10), 10)) for _ in range(6)]
    (probe,) = [assignment for assignment, number in running if number == 1]
    placed.step(1, gap_s, 20)
    probe.note(DONE)
    assert placed.balancer.ejections == {"latency": ejections}
    assert (1 in {placed.place(Demand(range(10), 10))[1] for _ in range(12)}) == (ejections == 1)


def test_a_slow_deployment_ejects_nobody():
    placed = Workers(3)
    each_step(placed, {0: 0.4, 1: 0.5, 2: 0.45})
    placed.balancer.eject_slow(placed.clients)
    assert not placed.balancer.ejections


def test_workers_that_are_gone_are_forgotten():
    placed = Workers(2)
    assignment, number = placed.place(Demand(range(1000), 10))
    placed.balancer.retain([placed.entries[1 - number]])
    assignment.leave()
    assert placed.balancer.record(placed.entries[number]).load == 0
