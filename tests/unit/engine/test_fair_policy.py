"""Who is served next: the tenant that got least for its weight, whatever the others have queued."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.messages import Tenant
from engine.policies.fair import MAX_MEMBERS, Fair, Times
from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.scheduler import Scheduler

HEAVY, LIGHT = Tenant("heavy"), Tenant("light")


class Queue:
    """A scheduler whose requests end after two tokens."""

    def __init__(self, **options) -> None:
        config = EngineConfig(**{"model": "none", "block_size": 4, "max_num_seqs": 1, "target_ttft_ms": 0, **options})
        self.scheduler = Scheduler(config, BlockPool(2000, 4, False), 4000, [], Fair())
        self.served: list[Tenant] = []
        self.number = 0

    def add(self, tenant: Tenant, count: int = 1, length: int = 8, **fields) -> None:
        for _ in range(count):
            self.number += 1
            params = SamplingParams(max_tokens=2, ignore_eos=True)
            prompt = [self.number] * length
            made = Request((1, self.number), prompt, params, arrival=float(self.number), tenant=tenant, **fields)
            assert self.scheduler.add(made) is None

    def step(self) -> None:
        before = {*self.scheduler.running}
        batch = self.scheduler.schedule()
        self.served += [r.tenant for r in batch.requests if r not in before]
        self.scheduler.launched(batch)
        self.scheduler.update(batch, {r: [9] for r in batch.requests})

    def serve(self, count: int) -> list[Tenant]:
        """The tenants of the next `count` requests that begin."""
        begun = len(self.served)
        while len(self.served) < begun + count and self.scheduler.has_work:
            self.step()
        return self.served[begun : begun + count]


def test_hundreds_of_one_tenant_do_not_delay_another():
    queue = Queue()
    queue.add(HEAVY, 300)
    queue.serve(20)
    queue.add(LIGHT)
    assert queue.serve(1) == [LIGHT]
    queue.add(LIGHT, 3)
    assert Counter(queue.serve(6)) == {LIGHT: 3, HEAVY: 3}


def test_many_slots_are_shared_from_the_first_step_on():
    queue = Queue(max_num_seqs=8)
    queue.add(HEAVY, 100)
    queue.add(LIGHT, 100)
    queue.step()
    assert Counter(queue.served) == {HEAVY: 4, LIGHT: 4}


@pytest.mark.parametrize("weight", [1.0, 2.0, 3.0])
def test_shares_follow_the_weights(weight):
    queue = Queue()
    favoured = Tenant("favoured", weight=weight)
    queue.add(HEAVY, 200)
    queue.add(favoured, 200)
    counts = Counter(queue.serve(120))
    assert counts[favoured] / counts[HEAVY] == pytest.approx(weight, rel=0.1)


def test_shares_are_of_tokens_not_of_requests():
    queue = Queue()
    queue.add(HEAVY, 100, length=100)
    queue.add(LIGHT, 400, length=10)
    counts = Counter(queue.serve(100))
    assert counts[LIGHT] / counts[HEAVY] == pytest.approx(104 / 14, rel=0.15)


def test_more_flows_do_not_get_a_tenant_more():
    queue = Queue()
    for number in range(10):
        queue.add(Tenant("heavy", f"flow-{number}"), 20)
    queue.add(LIGHT, 100)
    assert Counter(tenant.key for tenant in queue.serve(60)) == {"heavy": 30, "light": 30}


def test_flows_of_one_tenant_take_turns():
    queue = Queue()
    first, second = Tenant("", "first"), Tenant("", "second")
    queue.add(first, 50)
    queue.add(second, 5)
    assert Counter(queue.serve(10)) == {first: 5, second: 5}


def test_a_pause_saves_nothing_up():
    queue = Queue()
    queue.add(LIGHT)
    queue.serve(1)
    queue.add(HEAVY, 300)
    queue.serve(100)
    queue.add(LIGHT, 100)
    assert Counter(queue.serve(40))[HEAVY] >= 18


def test_what_was_got_alone_is_no_debt():
    queue = Queue()
    queue.add(HEAVY, 100)
    queue.serve(90)
    queue.add(LIGHT, 100)
    queue.add(HEAVY, 100)
    assert Counter(queue.serve(40))[HEAVY] >= 18


def test_bands_come_before_tenants_and_priorities_within_one():
    queue = Queue()
    queue.add(HEAVY, 5)
    queue.add(HEAVY, 1, priority=-1, length=9)
    queue.add(LIGHT, 3, band=-5)
    queue.add(LIGHT, 2, band=5)
    assert queue.serve(2) == [LIGHT, LIGHT]
    assert queue.serve(1) == [HEAVY]
    assert queue.scheduler.running[0].num_prompt_tokens == 9


def test_the_heaviest_of_the_lowest_band_gives_way():
    policy, running = Fair(), []
    for number, (tenant, band) in enumerate([(HEAVY, 0), (LIGHT, 0), (HEAVY, 0), (LIGHT, 7), (LIGHT, 7)], 1):
        params = SamplingParams(max_tokens=2)
        running.append(Request((1, number), [1] * 8, params, float(number), tenant=tenant, band=band))
    assert policy.victim(running).key == (1, 3)
    assert policy.victim(running[3:]).key == (1, 5)


def test_who_gives_way_holds_most_for_its_weight():
    """Twice 8 tokens of a tenant are more than once 12, and less if it has twice the weight."""
    for weight, victim in ((1.0, 2), (2.0, 3)):
        tenants = [Tenant("two", weight=weight)] * 2 + [Tenant("one")]
        running = [
            Request((1, number), [1] * length, SamplingParams(max_tokens=2), float(number), tenant=tenant)
            for number, (tenant, length) in enumerate(zip(tenants, (8, 8, 12), strict=True), 1)
        ]
        assert Fair().victim(running).key == (1, victim)


def test_of_equal_tenants_the_one_whose_sequence_began_first_elsewhere_comes_first():
    queue = Queue()
    queue.add(LIGHT, 3)
    params = SamplingParams(max_tokens=9)
    moved = Request((1, 99), [1] * 8, params, arrival=0.5, tenant=HEAVY)
    moved.token_ids += [5, 6]
    assert queue.scheduler.add(moved) is None
    assert queue.serve(1) == [HEAVY]


def test_what_has_begun_elsewhere_waits_for_its_band_and_its_tenants_turn():
    """The steps of a beam search are such sequences, without end; so are all those of a decode worker."""
    queue = Queue()

    def add_begun(band: int) -> None:
        queue.number += 1
        request = Request((1, queue.number), [7] * 8, SamplingParams(max_tokens=2), 0.5, tenant=HEAVY, band=band)
        request.token_ids.append(5)
        assert queue.scheduler.add(request) is None

    for _ in range(8):
        add_begun(band=0)
    queue.serve(2)
    queue.add(LIGHT, 2)
    assert Counter(queue.serve(4)) == {LIGHT: 2, HEAVY: 2}
    queue.add(LIGHT, band=1)
    assert queue.serve(1) == [LIGHT]


def test_memory_is_bounded_whatever_names_come():
    times = Times()
    for number in range(3 * MAX_MEMBERS):
        times.enter(f"n{number}")
        times.charge(f"n{number}", 1.0)
        times.advance([f"n{number}"])
    assert len(times._times) <= MAX_MEMBERS
