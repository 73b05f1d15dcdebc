"""Who is served next: the tenant that got least for its weight, whatever the others have queued."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.gates.base import Gate
from engine.messages import Tenant
from engine.policies.fair import MAX_MEMBERS, Fair, Times
from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.scheduler import Scheduler

HEAVY, LIGHT = Tenant("heavy"), Tenant("light")


class Queue:
    """A scheduler whose requests end after two tokens."""

    def __init__(self, blocks: int = 2000, gates: Sequence[Gate] = (), **options) -> None:
        config = EngineConfig(**{"model": "none", "block_size": 4, "max_num_seqs": 1, "target_ttft_ms": 0, **options})
        self.scheduler = Scheduler(config, BlockPool(blocks, 4, False), 4000, [], Fair(), gates)
        self.served: list[Tenant] = []
        self.number = 0

    def add(self, tenant: Tenant, count: int = 1, length: int = 8, max_tokens: int = 2, **fields) -> None:
        for _ in range(count):
            self.number += 1
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            prompt = [self.number] * length
            made = Request((1, self.number), prompt, params, arrival=float(self.number), tenant=tenant, **fields)
            assert self.scheduler.add(made) is None

    def step(self) -> None:
        before = {*self.scheduler.running}
        batch = self.scheduler.schedule()
        self.served += [r.tenant for r in batch.requests if r not in before]
        self.scheduler.launched(batch)
        self.scheduler.update(batch, {r: [9] for r in batch.requests})

    @property
    def running(self) -> dict[str, int]:
        """How many sequences of each tenant run."""
        return dict(Counter(request.tenant.key for request in self.scheduler.running))

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


LONG = {"max_tokens": 400}


class TestPlaces:
    """While tenants wait, none holds more sequences than its share."""

    @pytest.mark.parametrize("heavies", [1, 4, 7])
    def test_a_light_tenant_starts_at_once_beside_those_that_hold_every_place(self, heavies):
        queue = Queue(max_num_seqs=8)
        for number in range(heavies):
            queue.add(Tenant(f"heavy{number}"), 16, **LONG)
        for _ in range(3):
            queue.step()
        assert sum(queue.running.values()) == 8
        queue.add(LIGHT)
        queue.step()
        assert queue.running["light"] == 1
        assert sum(queue.running.values()) == 8
        assert queue.scheduler.num_preemptions == 1

    def test_the_youngest_of_the_heaviest_yields(self):
        queue = Queue(max_num_seqs=8)
        queue.add(HEAVY, 5, **LONG)
        queue.add(Tenant("middle"), 3, **LONG)
        queue.step()
        before = [*queue.scheduler.running]
        queue.add(LIGHT)
        queue.step()
        (gone,) = {*before} - {*queue.scheduler.running}
        assert (gone.tenant, gone.arrival) == (HEAVY, 5.0)

    @pytest.mark.parametrize(("weight", "share"), [(1.0, 4), (3.0, 6), (0.25, 1)])
    def test_shares_are_by_weight(self, weight, share):
        queue = Queue(max_num_seqs=8)
        queue.add(HEAVY, 30, **LONG)
        queue.step()
        queue.add(Tenant("light", weight=weight), 30, **LONG)
        for _ in range(5):
            queue.step()
        assert queue.running == {"heavy": 8 - share, "light": share}
        assert queue.scheduler.num_preemptions == share  # nobody is preempted in turn

    def test_more_tenants_than_places_wait_for_their_turn(self):
        queue = Queue(max_num_seqs=4)
        for number in range(9):
            queue.add(Tenant(f"t{number}"), **LONG)
        for _ in range(20):
            queue.step()
        assert queue.scheduler.num_preemptions == 0

    @pytest.mark.parametrize(("flow", "preemptions"), [("", 0), ("b", 1)])
    def test_without_keys_a_flow_is_a_tenant(self, flow, preemptions):
        queue = Queue(max_num_seqs=4)
        queue.add(Tenant("", "a" if flow else ""), 9, **LONG)
        queue.step()
        queue.add(Tenant("", flow))
        queue.step()
        assert queue.scheduler.num_preemptions == preemptions

    def test_flows_of_one_key_share_its_places(self):
        queue = Queue(max_num_seqs=4)
        queue.add(Tenant("key", "a"), 9, **LONG)
        queue.step()
        queue.add(Tenant("key", "b"), 9, **LONG)
        queue.step()
        assert queue.scheduler.num_preemptions == 0

    @pytest.mark.parametrize(("band", "preemptions"), [(-1, 0), (0, 1), (1, 1)])
    def test_a_lower_band_takes_no_place_of_a_higher_one(self, band, preemptions):
        queue = Queue(max_num_seqs=4)
        queue.add(HEAVY, 9, **LONG)
        queue.step()
        queue.add(LIGHT, band=band)
        queue.step()
        assert queue.scheduler.num_preemptions == preemptions

    def test_blocks_are_made_free_as_well(self):
        queue = Queue(blocks=61, max_num_seqs=32)
        queue.add(HEAVY, 30, length=16, max_tokens=200)
        queue.step()
        assert 1 < sum(queue.running.values()) < 32
        queue.add(LIGHT, length=16)
        steps = 0
        while (
            "light" not in queue.running
        ):  # first it is found that too few blocks are free, then one after another yields
            queue.step()
            steps += 1
        assert steps <= 6
        assert queue.running["heavy"] > 1

    def test_a_request_that_something_else_keeps_waiting_takes_no_place(self):
        class Shut(Gate):
            def may_start(self, request):
                return request.tenant != LIGHT

        queue = Queue(max_num_seqs=4, gates=[Shut()])
        queue.add(HEAVY, 9, **LONG)
        queue.step()
        queue.add(LIGHT)
        queue.add(Tenant("other"))
        queue.step()
        assert queue.running == {"heavy": 3, "other": 1}

    def test_all_come_to_their_end(self):
        queue = Queue(max_num_seqs=8)
        ended = []
        queue.add(HEAVY, 40, max_tokens=50)
        for number in range(400):
            if number % 5 == 0:
                queue.add(LIGHT, max_tokens=4)
            before = {*queue.scheduler.running}
            queue.step()
            ended += [r for r in before if r not in queue.scheduler.running and r not in queue.scheduler.waiting]
        assert Counter(r.tenant for r in ended) == {HEAVY: 40, LIGHT: 80}
        assert all(r.num_output_tokens == r.params.max_tokens for r in ended)
        queue.scheduler.pool.check_integrity()


def asked(number: int, tenant: Tenant, prompt: int = 8, rest: int = 1, computed: int = 0, **fields) -> Request:
    """A request that has `computed` tokens of its prompt done and at most `rest` tokens to say."""
    params = SamplingParams(max_tokens=rest)
    made = Request((1, number), [1] * prompt, params, arrival=float(number), tenant=tenant, **fields)
    made.num_computed_tokens = computed
    return made


def order(fair: Fair, waiting: Sequence[Request], running: Sequence[Request] = ()) -> list[int]:
    return [request.key[1] for request in fair.startable(waiting, running)]


class TestTurns:
    """Whose turn it is, by what each was served, holds and is about to get, divided by its weight."""

    @pytest.mark.parametrize(("weight", "first"), [(1.0, 2), (3.9, 2), (4.1, 1), (8.0, 1)])
    def test_what_runs_counts_by_its_tenants_weight(self, weight, first):
        a, b = Tenant("a", weight=weight), Tenant("b")
        running = [asked(10, a, prompt=8, rest=98), asked(11, b, prompt=20, rest=20)]  # 400 and 100 are outstanding
        assert order(Fair(), [asked(1, a), asked(2, b)], running)[0] == first

    def test_all_that_a_tenant_runs_counts_together(self):
        a, b = Tenant("a"), Tenant("b")
        running = [asked(10, a, rest=20), asked(11, a, rest=20), asked(12, b, rest=30)]
        assert order(Fair(), [asked(1, a), asked(2, b)], running) == [2, 1]

    @pytest.mark.parametrize(("weight", "turns"), [(1.0, "abababab"), (2.0, "ababaaba"), (0.5, "abbabbab")])
    def test_turns_within_one_step_are_by_weight(self, weight, turns):
        a, b = Tenant("a", weight=weight), Tenant("b")
        waiting = [asked(i, tenant) for i, tenant in enumerate([a, b] * 12)]
        names = [waiting[number].tenant.key for number in order(Fair(), waiting)]
        assert "".join(names[:8]) == turns

    def test_a_turn_costs_what_the_request_is_expected_to(self):
        a, b = Tenant("a"), Tenant("b")
        long, short = (
            [asked(i, a, prompt=100, rest=25) for i in range(3)],
            [asked(i, b, prompt=10, rest=10) for i in range(3, 12)],
        )
        assert order(Fair(), [*long, *short]) == [0, 3, 4, 5, 6, 1, 7, 8, 9, 10, 2, 11]  # 200 and 50

    @pytest.mark.parametrize(("fields", "cost"), [
        ({"prompt": 30, "rest": 1}, 34), ({"prompt": 30, "rest": 1, "computed": 20}, 14),
        ({"prompt": 30, "rest": 9, "computed": 30}, 36), ({"prompt": 8, "rest": 4000}, 8 + 4 * 256),
    ])  # fmt: skip
    def test_the_expected_cost(self, fields, cost):
        """A token of the prompt counts one, a generated one four, up to 256 of them."""
        a, b = Tenant("a"), Tenant("b")
        for other, first in ((cost - 5, 2), (cost + 1, 1)):
            running = [asked(10, a, **fields), asked(11, b, prompt=other - 4, rest=1)]
            assert order(Fair(), [asked(1, a), asked(2, b)], running)[0] == first

    def test_one_whose_tokens_are_all_said_counts_one_more(self):
        a, b = Tenant("a"), Tenant("b")
        done = asked(10, a, prompt=8, rest=2)
        done.token_ids += [5, 5]
        done.num_computed_tokens = 10
        assert order(Fair(), [asked(1, a), asked(2, b)], [done, asked(11, b, prompt=1, rest=1)])[0] == 1  # 4 and 5

    def test_flows_of_a_tenant_take_turns(self):
        x, y = Tenant("a", "x"), Tenant("a", "y")
        running = [asked(10, x, rest=50), asked(11, y, rest=20)]
        waiting = [
            asked(1, x),
            asked(2, x),
            asked(3, y, rest=10),
            asked(4, y, rest=10),
            asked(5, y, rest=10),
            asked(6, y, rest=10),
        ]
        assert order(Fair(), waiting, running) == [3, 4, 5, 1, 2, 6]  # y has 88, 136, 184 and 232; x has 208 and 220

    def test_bands_come_before_tenants_and_priority_before_arrival(self):
        requests: list[Request] = []
        for number, (band, priority) in enumerate([(0, 0), (1, 5), (0, -1), (1, 0), (-1, -9)]):
            Fair().insert(asked(number, HEAVY, band=band, priority=priority), requests)
        assert [request.key[1] for request in requests] == [3, 1, 2, 0, 4]
        assert order(Fair(), requests) == [3, 1, 2, 0, 4]


class TestTimes:
    def test_who_comes_late_begins_at_the_time_of_those_that_are_served(self):
        times = Times()
        assert times.of("a") == 0.0
        times.charge("a", 10.0)
        times.charge("b", 4.0)
        times.advance({"a", "b"})
        assert (times.of("new"), times.of("a")) == (4.0, 10.0)
        times.enter("new")
        times.charge("new", 1.0)
        assert times.of("new") == 5.0
        times.enter("a")
        assert times.of("a") == 10.0  # a debt stays

    @pytest.mark.parametrize("count", [MAX_MEMBERS, MAX_MEMBERS + 1])
    def test_of_too_many_members_the_most_indebted_are_remembered(self, count):
        times = Times()
        for number in range(count):
            times.charge(f"m{number}", float(number))
        times.advance({"m0"})
        forgotten = [number for number in range(count) if times.of(f"m{number}") != number]
        half = MAX_MEMBERS // 2
        assert forgotten == ([] if count == MAX_MEMBERS else [*range(1, count - half)])


def test_the_victim_is_of_whoever_holds_most_for_its_weight():
    heavy, light = Tenant("a", weight=4.0), Tenant("b")
    running = [asked(1, heavy, prompt=30), asked(2, heavy, prompt=30), asked(3, light, prompt=14)]
    assert Fair().victim(running).key[1] == 2 + (60 / 4 < 14)
    running[2] = asked(3, light, prompt=16)
    assert Fair().victim(running).key[1] == 3
    running += [asked(4, light, prompt=1, priority=-1), asked(5, heavy, prompt=1, band=-1)]
    assert Fair().victim(running).key[1] == 5


class TestServed:
    """What a step costs whom."""

    @pytest.mark.parametrize(("tokens", "cost"), [((5, 7), 12), ((5, 1), 6)])
    def test_all_of_a_flow_in_one_step_counts_together(self, tokens, cost):
        a, b = Tenant("a"), Tenant("b")
        for other, first in ((cost - 1, 2), (cost + 1, 1)):
            fair = Fair()
            fair.served([asked(10, a), asked(11, a), asked(12, b, prompt=50)], [*tokens, other])
            assert order(fair, [asked(1, a), asked(2, b)])[0] == first

    def test_a_new_flow_begins_at_the_time_of_the_flow_that_is_served(self):
        x, y = Tenant("a", "x"), Tenant("a", "y")
        fair = Fair()
        fair.served([asked(10, x, prompt=200)], [100])
        waiting: list[Request] = []
        for number, tenant in ((1, x), (2, y)):
            fair.insert(asked(number, tenant), waiting)
        fair.served([asked(11, y)], [4])
        assert order(fair, waiting)[0] == 1

    def test_a_flow_that_is_served_keeps_its_debt_when_it_asks_again(self):
        x, y = Tenant("a", "x"), Tenant("a", "y")
        fair = Fair()
        fair.served([asked(10, x, prompt=99), asked(11, y, prompt=99)], [50, 10])
        waiting: list[Request] = []
        for number, tenant in ((1, x), (2, y)):
            fair.insert(asked(number, tenant), waiting)
        assert order(fair, waiting)[0] == 2

    def test_a_share_of_less_than_a_token_counts(self):
        rich, poor = Tenant("rich", weight=1000.0), Tenant("poor")
        running = [asked(10, rich, prompt=100, rest=50)]  # 0.3 of what its weight buys
        assert order(Fair(), [asked(1, rich), asked(2, poor)], running)[0] == 2


def test_one_of_the_holders_that_has_less_gets_a_place_of_the_other():
    """Not only who holds none: also who waits for more of what it has."""
    running = [*(asked(n, HEAVY) for n in range(7)), asked(7, LIGHT)]
    (gone,) = Fair().yields([asked(8, LIGHT)], running, 8, lambda request: True)
    assert (gone.tenant, gone.key[1]) == (HEAVY, 6)
    assert Fair().yields([asked(8, HEAVY)], running, 8, lambda request: True) == []
