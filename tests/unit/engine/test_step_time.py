"""Prompts beside decoding sequences are divided so that each step keeps to its time, on machines of every speed."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.policies.priority import Priority
from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.scheduler import Scheduler
from engine.step_time import FIRST_TOKENS, GROWTH, LEAST_TOKENS, Fit, PrefillLimit, StepTime


class Machine:
    """A made-up machine: every step takes as long as its work says, with noise."""

    def __init__(self, token_s: float, pair_s: float, row_s: float, fixed_s: float, noise: float = 0.05) -> None:
        self.token_s, self.pair_s, self.row_s, self.fixed_s, self.noise = token_s, pair_s, row_s, fixed_s, noise
        self.random = random.Random(1)

    def seconds(self, rows: int, chunks: list[tuple[int, int]]) -> float:
        work = self.fixed_s + rows * self.row_s
        work += sum(n * self.token_s + n * (start + n / 2) * self.pair_s for n, start in chunks)
        return work * self.random.uniform(1 - self.noise, 1 + self.noise)


MACHINES = {"slow": (3e-3, 2e-7, 5e-3, 50e-3), "fast": (5e-5, 5e-9, 2e-4, 2e-3), "attention": (1e-4, 4e-7, 1e-3, 10e-3)}
"""A test makes a new one of these, whose noise does not depend on the tests before it."""


class Simulation:
    """A scheduler on such a machine."""

    def __init__(self, machine: Machine, **options: object) -> None:
        self.machine, self.time = machine, StepTime()
        config = EngineConfig(model="none", block_size=16, max_num_batched_tokens=1024, **options)
        self.scheduler = Scheduler(config, BlockPool(20_000, 16, False), 100_000, [], Priority(), step_time=self.time)
        self.numbers = iter(range(1 << 20))

    def add(self, length: int) -> None:
        number = next(self.numbers)
        params = SamplingParams(max_tokens=2000, ignore_eos=True)
        assert self.scheduler.add(Request((1, number), [5] * length, params, arrival=number)) is None

    def step(self, awaited: bool = False) -> tuple[float, int, list[tuple[int, int]]]:
        """The seconds of a step, the sequences that decoded in it, and its chunks."""
        batch = self.scheduler.schedule(awaited)
        rows, chunks = len(batch.requests) - len(batch.chunks), batch.chunks
        seconds = self.machine.seconds(rows, chunks)
        self.time.learn(seconds, rows, chunks, batch.bounded)
        self.scheduler.launched(batch)
        done = {r: [7] for r, end in zip(batch.requests, batch.ends, strict=True) if end == len(r.token_ids)}
        self.scheduler.update(batch, done)
        return seconds, rows, chunks


@pytest.mark.parametrize("name", MACHINES)
def test_a_joining_prompt_of_any_length_stops_nobody_for_longer(name):
    machine = Machine(*MACHINES[name])
    simulation = Simulation(machine, max_step_ms=150)
    for _ in range(4):
        simulation.add(20)
    for _ in range(20):
        simulation.step()
    for length in (6000, 50, 900, 12_000):
        simulation.add(length)
    ratios, beside, number = [], [], 0
    scheduler = simulation.scheduler
    while scheduler.waiting or not all(request.decodes for request in scheduler.running):
        number += 1
        seconds, rows, chunks = simulation.step()
        if rows and chunks:
            least = machine.fixed_s + rows * machine.row_s + LEAST_TOKENS * (machine.token_s + 12_000 * machine.pair_s)
            beside.append(sum(n for n, _ in chunks))
            if number > 4:  # the first chunks teach what the machine does
                ratios.append(seconds / max(0.150, least))
    assert sum(ratio > 1.1 for ratio in ratios) <= 1  # where a prompt of another kind begins
    assert max(ratios) < 1.5
    assert sum(beside) == 18_950


@pytest.mark.parametrize("name", MACHINES)
def test_the_time_is_used(name):
    """Chunks are not smaller than they need be: most of the limit goes to the prompt."""
    simulation = Simulation(Machine(*MACHINES[name]), max_step_ms=150)
    simulation.add(20)
    for _ in range(20):
        simulation.step()
    simulation.add(30_000)
    taken = [(seconds, chunks) for seconds, _, chunks in (simulation.step() for _ in range(90)) if chunks][20:-1]
    full = [seconds for seconds, chunks in taken if sum(n for n, _ in chunks) < 1023]
    assert all(seconds > 0.1 for seconds in full)
    assert len(full) == len(taken) or name == "fast"


def test_nothing_is_bounded_while_nobody_decodes():
    simulation = Simulation(Machine(*MACHINES["slow"]), max_step_ms=150)
    simulation.add(5000)
    assert simulation.step()[2] == [(1024, 0)]
    assert simulation.step()[2] == [(1024, 1024)]


@pytest.mark.parametrize("name", MACHINES)
def test_who_waits_for_blocks_waits_no_longer_than_a_sequence_that_decodes(name):
    simulation = Simulation(Machine(*MACHINES[name]), max_step_ms=150)
    simulation.add(90_000)
    for _ in range(20):
        simulation.step()
    awaited = [simulation.step(awaited=True)[0] for _ in range(20)]
    least = sum(n for n, _ in simulation.step()[2])
    assert max(awaited[2:]) < 0.2
    assert least == 1024


@pytest.mark.parametrize("awaited", [True, False])
def test_the_margin_learns_from_steps_that_have_a_limit(awaited):
    """On a calm machine it shrinks, also where nothing decodes and another worker waits for blocks; unlimited steps say nothing about it."""
    simulation = Simulation(Machine(*MACHINES["slow"]), max_step_ms=150)
    simulation.add(90_000)
    before = simulation.time.margin
    for _ in range(40):
        simulation.step(awaited=awaited)
    assert simulation.time.margin < before - 0.2 if awaited else simulation.time.margin == before


def test_no_limit():
    simulation = Simulation(Machine(*MACHINES["slow"]), max_step_ms=0)
    simulation.add(20)
    simulation.step()
    simulation.add(5000)
    assert simulation.step()[2] == [(1023, 0)]


def test_a_prompt_goes_on_where_decoding_alone_takes_longer_than_the_limit():
    simulation = Simulation(Machine(1e-3, 0.0, 1.0, 0.0), max_step_ms=150)
    simulation.add(20)
    for _ in range(12):
        simulation.step()
    simulation.add(200)
    counts = [sum(n for n, _ in simulation.step()[2]) for _ in range(20)]
    assert counts[:12] == [LEAST_TOKENS] * 12
    assert sum(counts) == 200


def test_a_slower_machine_is_noticed():
    """A neighbour takes most of the machine: after a few steps the chunks fit again."""
    simulation = Simulation(Machine(1e-4, 0.0, 1e-3, 5e-3), max_step_ms=150)
    simulation.add(20)
    simulation.add(90_000)
    for _ in range(30):
        simulation.step()
    simulation.machine = Machine(8e-4, 0.0, 8e-3, 40e-3)
    seconds = [simulation.step()[0] for _ in range(40)]
    assert max(seconds[12:]) < 0.25


def test_before_anything_is_known_chunks_are_small():
    limit = PrefillLimit(StepTime(), 0.1)
    assert limit.grant(5000, 0) == FIRST_TOKENS
    assert limit.exhausted
    assert limit.grant(5000, 0) == 0


@given(st.floats(1e-6, 1e-2), st.floats(0.0, 1e-6), st.floats(1e-3, 10.0), st.integers(0, 100_000))
def test_what_fits_takes_the_time(token_s, pair_s, seconds, start):
    time = StepTime()
    for count, before in ((100, 0), (500, 3000), (1000, 20_000), (64, 90_000)) * 8:
        time.learn(count * token_s + count * (before + count / 2) * pair_s, 0, [(count, before)])
    fitting = time.fitting(seconds, start)
    assert time.prefill_s(fitting, start) <= seconds * 1.01
    assert fitting == time.most_tokens or time.prefill_s(fitting + 1, start) >= seconds * 0.99


def test_a_hundred_thousand_equal_observations_leave_the_estimate_sound():
    fit = Fit(2)
    for _ in range(100_000):
        fit.learn((1.0, 2.0), 0.5)
    assert math.isclose(fit.value((1.0, 2.0)), 0.5, rel_tol=1e-3)
    for _ in range(20):
        fit.learn((1.0, 8.0), 2.0)
    assert math.isclose(fit.value((1.0, 8.0)), 2.0, rel_tol=0.05)


def test_a_wrong_idea_of_decoding_is_corrected_by_steps_with_prompts():
    """Where prompts never stop coming, no step shows what decoding alone takes."""
    machine = Machine(3e-4, 0.0, 3e-4, 15e-3, noise=0.0)
    time = StepTime()
    for _ in range(20):
        time.learn(machine.seconds(32, [(200, 0)]), 32, [(200, 0)])
    time.learn(0.2, 30, [])
    for _ in range(8):
        time.learn(machine.seconds(16, [(16, 0)]), 16, [(16, 0)])
    assert time.decode_s(16) < 0.03


def test_one_step_that_the_machine_slept_through_is_not_believed():
    time = StepTime()
    for _ in range(50):
        time.learn(0.1, 0, [(1000, 0)])
    time.learn(600.0, 0, [(1000, 0)])
    for _ in range(10):
        time.learn(0.1, 0, [(1000, 0)])
    assert 0.09 < time.decode_s(0) + time.prefill_s(1000, 0) < 0.13


def test_short_steps_that_the_machine_sleeps_through_make_long_ones_no_dearer():
    machine, time, dice = Machine(5e-5, 5e-9, 2e-4, 2e-3), StepTime(), random.Random(1)
    for _ in range(5):
        time.learn(machine.seconds(0, [(512, 0)]), 0, [(512, 0)])
    rates = []
    for _ in range(3000):
        rows, chunks = dice.randint(1, 6), [(dice.randint(3, 20), 0)] if dice.random() < 0.3 else []
        slept_s = dice.uniform(0.05, 1.0) if dice.random() < 0.03 else 0.0
        time.learn(machine.seconds(rows, chunks) + slept_s, rows, chunks)
        rates.append(time.prefill_rate(2048, rows))
    assert min(rates) > 512 / (512 / 19_000 + 1.0), "none is slower than one step of a second's sleep"


@pytest.mark.parametrize("seed", range(8))
def test_short_steps_of_a_disturbed_machine_do_not_undo_the_estimate(seed):
    """Steps whose work hardly differs and whose time does, with pauses: the numbers stay those of the machine."""
    step_time, machine, chance = StepTime(), Machine(1e-4, 1e-9, 3e-4, 1e-3), random.Random(seed)
    for _ in range(6000):
        rows = chance.randrange(1, 7)
        chunks = [(chance.choice((1, 5)), 0)] * chance.choice((0, 0, 0, 0, 1, 2, 3))
        pause = chance.choice((0.01, 0.05, 0.2, 1.0)) if chance.random() < 0.02 else 0.0
        step_time.learn(machine.seconds(rows, chunks) * chance.lognormvariate(0, 0.5) + pause, rows, chunks)
    assert 0.3 < step_time.decode_s(3) / machine.seconds(3, []) < 10


def test_prompts_that_seem_to_cost_nothing_are_not_computed_all_at_once():
    """Steps with equally many prompt tokens do not tell what one costs. Many short prompts that wait then come in small steps all the
    same, until larger steps have told.
    """
    time = StepTime()
    time.learn(7.0, 0, [(1024, 0)])
    for _ in range(60):
        time.learn(0.1, 24, [(LEAST_TOKENS, 0)])
    time._fit._values[2:] = [0.0, 0.0]
    limit = PrefillLimit(time, 0.05)
    granted = [limit.grant(128, 0) for _ in range(20) if not limit.exhausted]
    assert sum(granted) <= GROWTH * LEAST_TOKENS
    for tokens in (64, 256, 1024):
        time.learn(0.1 + tokens * 1e-5, 24, [(tokens, 0)])
    assert time.most_tokens == GROWTH * 1024, "steps that may be large become so within three"
