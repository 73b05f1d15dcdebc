"""Which requests the next step computes, how many tokens of each, and when a request ends; the model is a script."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from engine.failures import Failure, FailureCode, FinishReason
from engine.gates.base import Gate
from engine.request import PENDING, RequestStatus
from engine.step_time import StepTime
from tests.unit.engine.scripted import SIZE, Engine, Open, ask, told

STOP, LENGTH, MOVED, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.MOVED, FinishReason.ERROR


class TestAdding:
    def test_a_sequence_as_long_as_the_model_takes_is_taken(self):
        Engine(ask(0, 12, max_tokens=8), max_model_len=20)

    def test_a_longer_one_is_refused_with_both_numbers(self):
        engine = Engine(max_model_len=20)
        assert engine.scheduler.add(ask(0, 13, max_tokens=8)) == Failure(
            FailureCode.TOO_LONG, {"tokens": 21, "limit": 20}
        )
        assert not engine.scheduler.has_work

    def test_one_that_fills_the_cache_is_taken(self):
        Engine(ask(0, 12, max_tokens=8), blocks=5)

    def test_one_that_never_fits_the_cache_is_refused(self):
        refused = Engine(blocks=5).scheduler.add(ask(0, 13, max_tokens=8))
        assert refused == Failure(FailureCode.TOO_LONG_FOR_CACHE, {"tokens": 21})

    def test_a_gate_refuses_what_can_never_pass(self):
        class Refuses(Gate):
            def refusal(self, request):
                return Failure(FailureCode.DRAINING) if request.key[1] == 1 else None

        engine = Engine(ask(0), gates=[Open(), Refuses()])
        assert engine.scheduler.add(ask(1)) == Failure(FailureCode.DRAINING)
        assert engine.waiting == [0]

    def test_a_full_queue_refuses_new_requests_and_takes_those_that_have_begun_elsewhere(self):
        engine = Engine(ask(0), max_waiting_requests=1)
        assert engine.scheduler.add(ask(1)).code is FailureCode.OVERLOADED
        begun = ask(2)
        begun.token_ids.append(7)
        engine.add(begun)
        assert engine.waiting == [0, 2]

    def test_what_the_cache_has_of_the_prompt_is_noted(self):
        engine = Engine(ask(0, range(9), max_tokens=1), caching=True)
        engine.step()
        again = ask(1, range(9))
        engine.add(again)
        assert again.num_reusable_tokens == 8

    def test_work_is_what_waits_or_runs(self):
        engine = Engine(ask(0, max_tokens=1))
        assert engine.scheduler.has_work
        batch = engine.scheduler.schedule()
        assert (engine.waiting, engine.running) == ([], [0])
        assert engine.scheduler.has_work
        engine.compute(batch)
        assert not engine.scheduler.has_work


class TestExpiring:
    @pytest.mark.parametrize(("deadline", "expires"), [(99.9, True), (100.0, True), (100.1, False), (None, False)])
    def test_a_request_that_nobody_began_is_too_late_at_its_deadline(self, deadline, expires):
        late = ask(0, deadline=deadline)
        engine = Engine(late, ask(1))
        dropped = engine.scheduler.expire(100.0)
        assert dropped == ([(late, ERROR)] if expires else [])
        assert late.failure == (Failure(FailureCode.TOO_LATE) if expires else None)
        assert engine.waiting == ([1] if expires else [0, 1])

    def test_one_that_has_begun_ends_by_timeout_and_frees_its_blocks(self):
        late = ask(0, deadline=5.0)
        engine = Engine(late)
        engine.step()
        assert engine.scheduler.expire(5.0) == [(late, FinishReason.TIMEOUT)]
        assert late.failure is None
        assert (late.status, engine.pool.num_free) == (RequestStatus.FINISHED, 100)

    def test_a_drop_goes_before_a_deadline_and_running_requests_before_waiting_ones(self):
        first, second = ask(0, deadline=1.0), ask(1)
        engine = Engine(first, second, max_num_seqs=1)
        engine.step()
        first.dropped, second.dropped = FinishReason.ABORT, MOVED
        assert engine.scheduler.expire(9.0) == [(first, FinishReason.ABORT), (second, MOVED)]

    def test_gates_are_polled_and_fail_requests(self):
        polled = []

        class Fails(Gate):
            def __init__(self, code):
                self.code = code

            def poll(self, busy):
                polled.append(busy)

            def failures(self, requests):
                return [(request, Failure(self.code)) for request in requests if request.key[1] == 1]

        engine = Engine(ask(0), ask(1), gates=[Open(), Fails(FailureCode.STEP_FAILED), Fails(FailureCode.DRAINING)])
        ((failed, reason),) = engine.scheduler.expire(0.0)
        assert (failed.key[1], reason, failed.failure) == (1, ERROR, Failure(FailureCode.STEP_FAILED))
        engine.step()
        engine.scheduler.expire(0.0)
        assert polled == [False, False, True, True]


@dataclass
class Told:
    """Stands for a request's hold, matcher and incoming blocks, and notes what it is told."""

    calls: list[str] = field(default_factory=list)
    settled: bool = True
    failure: Failure | None = None
    complete: bool = False
    ready: bool = True
    computed: int = 0

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append(name)

    def fill(self, request):
        request.num_computed_tokens = request.num_read_tokens = self.computed
        self.calls.append("fill")

    def advance(self, token):
        self.calls.append(f"advance {token}")

    def keep(self, request):
        self.calls.append("keep" if request.block_table else "keep nothing")

    def progress(self, request):
        assert request.status is RequestStatus.RUNNING
        self.calls.append("progress")


def test_who_leaves_lets_go_of_all_that_it_holds():
    request = ask(0, matcher=Told(), hold=Told(), incoming=Told(settled=False))
    engine = Engine(request)
    engine.scheduler.finish(request)
    assert (request.matcher.calls, request.hold.calls, request.incoming.calls) == (["close"], ["leave"], ["cancel"])
    assert engine.waiting == []


class TestBudget:
    def test_a_long_prompt_is_computed_in_chunks(self):
        engine = Engine(ask(0, 25), max_num_batched_tokens=10)
        assert [engine.step() for _ in range(4)] == [{0: 10}, {0: 10}, {0: 5}, {0: 1}]

    def test_what_a_prompt_leaves_goes_to_the_next(self):
        engine = Engine(ask(0, 6), ask(1, 6), ask(2, 6), max_num_batched_tokens=10)
        assert engine.step() == {0: 6, 1: 4}
        assert engine.step() == {0: 1, 1: 2, 2: 6}

    def test_a_prompt_leaves_a_token_to_each_that_decodes(self):
        engine = Engine(ask(0, 4), ask(1, 4), max_num_batched_tokens=10)
        engine.step()
        engine.add(ask(2, 30, priority=-1), ask(3, 30, priority=-2))
        assert engine.step() == {0: 1, 1: 1, 3: 8}
        assert engine.running == [3, 0, 1]
        assert engine.step() == {3: 8, 0: 1, 1: 1}

    def test_a_prompt_with_no_token_left_waits_and_those_that_decode_go_on(self):
        engine = Engine(ask(0, 2), ask(1, 2), max_num_batched_tokens=4)
        engine.step()
        engine.add(ask(2, 9, priority=-1))
        assert engine.step() == {0: 1, 1: 1, 2: 2}
        engine.change(max_num_batched_tokens=2, max_num_seqs=2)
        assert engine.step() == {0: 1, 1: 1}

    def test_a_prompt_behind_those_that_decode_gets_all_that_they_leave(self):
        engine = Engine(ask(0, 4), ask(1, 4), max_num_batched_tokens=10)
        engine.step()
        engine.add(ask(2, 30))
        assert engine.step() == {0: 1, 1: 1, 2: 8}
        assert engine.step() == {0: 1, 1: 1, 2: 8}

    def test_a_single_token_is_enough_to_begin(self):
        assert Engine(ask(0, 9), ask(1, 4), max_num_batched_tokens=10).step() == {0: 9, 1: 1}

    def test_who_decodes_first_comes_first_where_not_all_have_room(self):
        engine = Engine(ask(0, 2), ask(1, 2), ask(2, 2))
        engine.step()
        engine.change(max_num_batched_tokens=2, max_num_seqs=2)
        assert engine.step() == {0: 1, 1: 1}

    def test_what_a_preempted_sequence_would_have_needed_goes_to_a_prompt(self):
        engine = Engine(ask(0, 7), ask(2, 13, priority=2), blocks=40, max_num_batched_tokens=24)
        engine.step()
        engine.add(ask(1, 40, priority=1))
        engine.change(max_num_batched_tokens=10, max_num_seqs=10)
        assert engine.step() == {0: 1, 2: 1, 1: 8}
        while engine.pool.num_free:
            engine.pool.allocate(ask(9), SIZE)
        assert engine.step() == {0: 1, 1: 9}
        assert engine.waiting == [2]

    def test_a_step_has_no_more_sequences_than_allowed(self):
        engine = Engine(*(ask(n) for n in range(4)), max_num_seqs=3)
        assert engine.step() == {0: 5, 1: 5, 2: 5}
        assert engine.waiting == [3]

    def test_nothing_runs_where_nothing_is(self):
        assert Engine().step() == {}

    def test_ends_count_the_computed_tokens_after_the_step(self):
        engine = Engine(ask(0, 25), max_num_batched_tokens=10)
        engine.step()
        batch = engine.scheduler.schedule()
        assert (batch.ends, batch.total_tokens, batch.chunks) == ([20], 10, [(10, 10)])


class TestTime:
    @staticmethod
    def engine(**options):
        times = StepTime()
        for _ in range(50):  # a millisecond for each prompt token, and for each sequence that decodes
            times.learn(1.0 / 1000 * 300, 0, [(300, 0)])
            times.learn(1.0 / 1000 * 100, 0, [(100, 0)])
            times.learn(1.0 / 1000, 1, [])
        return Engine(ask(0, 4), step_time=times, max_step_ms=100, max_num_batched_tokens=500, blocks=300, **options)

    def test_prompts_are_limited_beside_a_sequence_that_decodes(self):
        engine = self.engine()
        assert not engine.scheduler.schedule().bounded
        engine = self.engine()
        engine.step()
        engine.add(ask(1, 400))
        batch = engine.scheduler.schedule()
        assert batch.bounded
        assert told(batch)[0] == 1
        assert 16 <= told(batch)[1] < 100

    def test_the_first_prompt_has_no_limit_unless_somebody_waits_for_the_step(self):
        assert self.engine().scheduler.schedule(awaited=True).bounded
        engine = self.engine()
        engine.change(max_step_ms=0)
        assert not engine.scheduler.schedule(awaited=True).bounded

    def test_a_second_prompt_waits_for_the_next_step_when_the_time_is_used(self):
        engine = self.engine()
        engine.step()
        engine.add(ask(1, 400), ask(2, 50))
        assert list(engine.step()) == [0, 1]
        assert engine.waiting == [2]


class TestBlocks:
    def test_admission_keeps_a_block_for_each_that_runs(self):
        engine = Engine(ask(0, 4, max_tokens=4), ask(1, 8, max_tokens=4), blocks=4)
        assert engine.step() == {0: 4, 1: 8}
        engine = Engine(ask(0, 4, max_tokens=4), ask(1, 9, max_tokens=4), blocks=4)
        assert engine.step() == {0: 4}, "three blocks are left, of which one is kept"
        assert engine.waiting == [1]

    def test_nobody_passes_the_first_that_does_not_fit(self):
        engine = Engine(*(ask(n, prompt, max_tokens=4) for n, prompt in enumerate((4, 9, 1))), blocks=4)
        assert engine.step() == {0: 4}
        assert engine.waiting == [1, 2]

    def test_the_last_gives_way_and_is_computed_again(self):
        first, last = ask(0, 8), ask(1, 7)
        engine = Engine(first, last, blocks=5)
        engine.step()
        assert engine.step() == {0: 1, 1: 1}
        assert [len(r.block_table) for r in (first, last)] == [3, 2]
        assert engine.step() == {0: 1}, "the ninth token of the last needs a block"
        assert (engine.running, engine.waiting) == ([0], [1])
        assert (last.status, last.num_computed_tokens, last.block_table) == (RequestStatus.WAITING, 0, [])
        assert (last.num_preemptions, engine.scheduler.num_preemptions) == (1, 1)
        assert len(last.token_ids) == 9, "what was sampled is kept"

    def test_every_preemption_is_counted(self):
        requests = [ask(0, 3, max_tokens=20), ask(1, 1, max_tokens=20), ask(2, 1, max_tokens=20)]
        engine = Engine(*requests, blocks=6)
        while engine.scheduler.has_work:
            engine.step()
        assert [request.num_preemptions for request in requests] == [0, 1, 2]
        assert engine.scheduler.num_preemptions == 3

    def test_nobody_is_admitted_in_a_step_that_preempts(self):
        engine = Engine(ask(0, 8), ask(1, 7), blocks=5)
        for _ in range(2):
            engine.step()
        engine.add(ask(2, 1, priority=-1))
        assert engine.step() == {0: 1}
        assert engine.waiting == [2, 1]

    def test_a_hold_is_suspended_before_its_blocks_go(self):
        last = ask(1, 7)
        engine = Engine(ask(0, 8), last, blocks=5)
        for _ in range(2):
            engine.step()
        last.hold = Told()
        engine.step()
        assert (engine.waiting, last.hold.calls) == ([1], ["suspend"])

    def test_the_prefix_of_a_request_that_runs_is_waited_for_and_then_shared(self):
        first, second = ask(0, [*range(12), 50]), ask(1, [*range(12), 60])
        engine = Engine(first, second, caching=True)
        assert engine.step() == {0: 13}
        assert engine.step() == {0: 1, 1: 1}
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 12)
        assert second.block_table[:3] == first.block_table[:3]
        assert (engine.scheduler.prefix_queries, engine.scheduler.prefix_hits) == (26, 12)

    def test_hits_of_all_requests_are_summed(self):
        engine = Engine(ask(0, range(9), max_tokens=1), caching=True)
        engine.step()
        engine.add(ask(1, range(9), max_tokens=1), ask(2, range(9), max_tokens=1))
        engine.step()
        assert (engine.scheduler.prefix_queries, engine.scheduler.prefix_hits) == (27, 16)

    def test_a_request_has_begun_when_it_starts(self):
        request = ask(0)
        engine = Engine(request)
        assert not request.begun
        engine.plan()
        assert request.begun

    def test_only_the_next_block_is_waited_for(self):
        engine = Engine(ask(0, [*range(4), *[5] * 9]), ask(1, [*range(20, 24), *[5] * 9]), caching=True)
        assert engine.step() == {0: 13, 1: 13}

    def test_a_prefix_in_chunks_is_waited_for_and_others_are_not_kept(self):
        engine = Engine(ask(0, [*range(28), 50, 51]), caching=True, max_num_batched_tokens=20)
        assert engine.step() == {0: 20}
        engine.add(ask(1, [*range(28), 60]), ask(2, 3))
        assert engine.step() == {0: 10, 2: 3}
        assert engine.step() == {0: 1, 2: 1, 1: 1}

    def test_what_the_cache_has_needs_no_blocks(self):
        engine = Engine(ask(0, [*range(12), 50], max_tokens=3), caching=True, blocks=6)
        engine.step()
        engine.add(ask(1, [*range(12), 60], max_tokens=3))
        assert engine.step() == {0: 1, 1: 1}

    def test_blocks_are_in_the_cache_once_their_step_is_read(self):
        first = ask(0, 12)
        engine = Engine(first, caching=True)
        batch = engine.scheduler.schedule()
        assert engine.pool.match(first.block_hashes) == []
        engine.compute(batch)
        assert engine.pool.match(first.block_hashes) == first.block_table[:3]
        assert first.num_read_tokens == 12

    def test_log_probabilities_of_a_prompt_need_every_position(self):
        engine = Engine(ask(0, range(13), max_tokens=1), caching=True)
        engine.step()
        engine.add(ask(1, range(13), params={"prompt_logprobs": 0}))
        assert engine.step() == {1: 13}

    def test_their_rows_are_limited(self):
        asked = {"prompt_logprobs": 0}
        engine = Engine(ask(0, 7, params=asked), ask(1, 7, params=asked), ask(2, 7), rows=4)
        assert engine.step() == {0: 4, 2: 7}
        assert engine.step() == {0: 3, 2: 1, 1: 2}

    def test_blocks_that_come_from_elsewhere_are_waited_for(self):
        coming, other = ask(0, 9, incoming=Told(settled=False, computed=8)), ask(1, 5)
        engine = Engine(coming, other)
        assert engine.step() == {1: 5}
        arrived, coming.incoming.settled = coming.incoming, True
        assert engine.step() == {1: 1, 0: 1}
        assert (arrived.calls, coming.incoming) == (["fill"], None)


class Stops(Gate):
    """Stops the requests of these numbers."""

    def __init__(self, start=(), step=()):
        self.start, self.step = set(start), set(step)
        self.begun, self.considered = [], []

    def begin(self, running):
        self.begun.append(list(running))

    def consider(self, request):
        self.considered.append(request.key[1])

    def may_start(self, request):
        return request.key[1] not in self.start

    def pausing(self, running):
        return [request for request in running if request.key[1] in self.step]


class TestGates:
    def test_who_is_stopped_does_not_block_who_comes_later(self):
        first, second = ask(0), ask(1)
        closed, counting = Stops(start=[0]), Stops()
        engine = Engine(first, second, gates=[closed, counting])
        assert engine.step() == {1: 5}
        assert (first.stopped_by_gate, second.stopped_by_gate) == (True, False)
        assert counting.considered == [0, 1], "gates are told of all whose turn it is"
        closed.start.clear()
        assert engine.step() == {1: 1, 0: 5}
        assert not first.stopped_by_gate

    def test_who_may_not_step_stays_where_it_is(self):
        gate = Stops()
        engine = Engine(ask(0), ask(1), gates=[Open(), gate])
        engine.step()
        gate.step.add(0)
        assert engine.step() == {1: 1}
        assert engine.running == [0, 1]

    def test_who_comes_behind_those_that_may_not_step_goes_on(self):
        gate = Stops()
        engine = Engine(*(ask(n) for n in range(4)), gates=[gate])
        engine.step()
        gate.step |= {1, 2}
        assert engine.step() == {0: 1, 3: 1}

    def test_gates_hear_of_a_steps_admissions_only_where_somebody_waits(self):
        gate = Stops()
        engine = Engine(ask(0), gates=[gate])
        engine.step()
        engine.step()
        assert gate.begun == [[]]


class TestTokens:
    def test_a_sampled_token_is_appended_and_computed_in_the_next_step(self):
        request = ask(0)
        engine = Engine(request)
        engine.step(t0=7)
        assert request.token_ids[5:] == [7]
        assert engine.step(t0=8) == {0: 1}
        assert (request.token_ids[5:], request.num_computed_tokens) == ([7, 8], 6)

    def test_a_token_that_is_still_computed_has_its_place(self):
        """The next step is scheduled before the tokens of this one are read."""
        request = ask(0)
        engine = Engine(request)
        first = engine.scheduler.schedule()
        engine.scheduler.launched(first, [request])
        assert (request.token_ids[5:], request.num_pending_tokens) == ([PENDING], 1)
        second = engine.scheduler.schedule()
        assert (told(second), second.ends) == ({0: 1}, [6])
        engine.scheduler.launched(second, [request])
        assert engine.scheduler.update(first, {request: [7]}) == {}
        assert (request.token_ids[5:], request.num_pending_tokens) == ([7, PENDING], 1)
        engine.scheduler.update(second, {request: [8]})
        assert (request.token_ids[5:], request.num_pending_tokens) == ([7, 8], 0)

    def test_one_that_ends_with_its_pending_token_is_in_no_further_step(self):
        requests = [ask(0, max_tokens=9), ask(1, max_tokens=1), ask(2, max_tokens=1), ask(3, max_tokens=9)]
        engine = Engine(*requests)
        batch = engine.scheduler.schedule()
        engine.scheduler.launched(batch, requests)
        assert engine.plan() == {0: 1, 3: 1}
        ended = engine.scheduler.update(batch, {request: [7] for request in requests})
        assert ended == {requests[1]: LENGTH, requests[2]: LENGTH}

    def test_tokens_of_a_request_that_is_gone_are_dropped(self):
        request, other = ask(0), ask(1)
        engine = Engine(request, other)
        batch = engine.scheduler.schedule()
        engine.scheduler.launched(batch)
        engine.scheduler.finish(request)
        sampled = {request: [7], other: [8]}
        assert engine.scheduler.update(batch, sampled) == {}
        assert sampled == {other: [8]}
        assert other.token_ids[5:] == [8]

    def test_one_that_was_preempted_while_its_step_ran_keeps_the_token(self):
        first, last = ask(0, 8), ask(1, 7)
        engine = Engine(first, last, blocks=5)
        engine.step()
        running = engine.scheduler.schedule()
        engine.scheduler.launched(running, [first, last])
        engine.scheduler.schedule()
        assert engine.waiting == [1]
        assert engine.scheduler.update(running, {first: [6], last: [7]}) == {}
        assert (last.token_ids[8:], last.num_read_tokens, last.status) == ([7], 0, RequestStatus.WAITING)


class TestEnds:
    def test_the_end_token_ends_it_unless_it_is_ignored(self):
        heeds, ignores = ask(0, params={"ignore_eos": False}), ask(1)
        engine = Engine(heeds, ignores, eos=[2, 3])
        batch = engine.scheduler.schedule()
        assert engine.compute(batch, t0=3, t1=3) == {0: STOP}
        assert engine.running == [1]
        assert not engine.scheduler.is_stop_token(ignores, 2)
        assert engine.scheduler.is_stop_token(heeds, 2)

    def test_a_stop_token_of_its_own_ends_it(self):
        engine = Engine(ask(0, params={"stop_token_ids": [7]}), ask(1))
        assert engine.compute(engine.scheduler.schedule(), t0=7, t1=7) == {0: STOP}

    def test_the_stop_token_counts_before_the_length(self):
        engine = Engine(ask(0, max_tokens=1, params={"stop_token_ids": [7]}))
        assert engine.compute(engine.scheduler.schedule(), t0=7) == {0: STOP}

    def test_it_ends_after_so_many_tokens(self):
        engine = Engine(ask(0, max_tokens=2))
        assert engine.compute(engine.scheduler.schedule()) == {}
        assert engine.compute(engine.scheduler.schedule()) == {0: LENGTH}
        assert engine.pool.num_free == 100

    def test_it_ends_at_the_longest_sequence(self):
        engine = Engine(ask(0, 5, max_tokens=3), max_model_len=8)
        engine.scheduler.max_model_len = 6
        assert engine.compute(engine.scheduler.schedule()) == {0: LENGTH}

    @pytest.mark.parametrize(("fields", "token", "reason", "told_to"), [
        ({}, 8, MOVED, ["progress", "keep", "leave"]),
        ({"max_tokens": 1}, 8, LENGTH, ["progress", "keep", "leave"]),
        ({"params": {"stop_token_ids": [7]}}, 7, STOP, ["progress", "leave"]),
    ])  # fmt: skip
    def test_one_that_goes_on_elsewhere_ends_after_a_token_and_keeps_its_blocks(self, fields, token, reason, told_to):
        request = ask(0, hold=Told(), **fields)
        engine = Engine(request)
        assert engine.compute(engine.scheduler.schedule(), t0=token) == {0: reason}
        assert request.hold.calls == told_to

    def test_with_a_grammar_the_end_is_known_when_its_mask_is(self):
        request = ask(0, matcher=Told())
        engine = Engine(request)
        assert engine.compute(engine.scheduler.schedule(), t0=[7, 8]) == {}
        assert (request.token_ids[5:], request.matcher.calls) == ([7], ["advance 7"]), "tokens come one by one"
        assert engine.scheduler.settle([request]) == {}
        request.matcher.complete = True
        assert engine.scheduler.settle([request]) == {request: STOP}
        assert engine.running == []

    def test_with_a_grammar_the_last_token_and_the_length_end_it_as_well(self):
        stops, full = (
            ask(0, matcher=Told(), params={"stop_token_ids": [7]}),
            ask(1, max_tokens=1, matcher=Told(), hold=Told()),
        )
        engine = Engine(stops, full)
        engine.step(t0=7, t1=8)
        assert engine.scheduler.settle([stops, full]) == {stops: STOP, full: LENGTH}
        assert full.hold.calls == ["progress", "keep", "leave"]

    def test_a_grammar_that_ends_keeps_no_blocks(self):
        request = ask(0, matcher=Told(complete=True), hold=Told())
        engine = Engine(request)
        engine.step()
        engine.scheduler.settle([request])
        assert request.hold.calls == ["progress", "leave"]

    def test_a_grammar_that_has_failed_ends_nothing_here(self):
        request = ask(0, max_tokens=1, matcher=Told(failure=Failure(FailureCode.STEP_FAILED)))
        engine = Engine(request)
        engine.step()
        assert engine.scheduler.settle([request]) == {}
        assert engine.running == [0]


@dataclass
class Repeats:
    """Proposes the same token again and again."""

    drafts: int = 2
    learned: list[tuple[int, int, int]] = field(default_factory=list)

    def propose(self, token_ids, limit):
        return [1] * min(limit, self.drafts)

    def learn(self, proposed, accepted, length):
        self.learned.append((proposed, accepted, length))


class TestDrafts:
    REPEATS = (1, 2, 3, 4, 1, 2)
    """After 1, 2 came 3, 4."""

    def engine(self, *requests, **options):
        return Engine(*requests, **{"speculative_tokens": 4, **options})

    def drafted(self, engine, **tokens):
        """The drafts of the next step, which is computed."""
        batch = engine.scheduler.schedule()
        found = {request.key[1]: drafts for request, drafts in batch.drafts.items()}
        engine.compute(batch, **tokens)
        return found

    def test_what_followed_before_is_proposed_and_computed_in_the_same_step(self):
        request = ask(0, self.REPEATS)
        engine = self.engine(request)
        engine.step(t0=3)
        batch = engine.scheduler.schedule()
        assert batch.drafts == {request: [4]}
        assert (told(batch), batch.ends, batch.chunks) == ({0: 2}, [7], [])
        assert engine.compute(batch, t0=[4, 1]) == {}
        assert (request.token_ids[6:], request.num_computed_tokens) == ([3, 4, 1], 8)

    def test_accepted_drafts_are_followed_by_more(self):
        engine = self.engine(ask(0, self.REPEATS * 3, max_tokens=20))
        engine.step(t0=3)
        assert self.drafted(engine, t0=[4, 1]) == {0: [4]}
        assert self.drafted(engine, t0=[2, 3, 4]) == {0: [2, 3]}

    def test_a_rejected_draft_pauses_them(self):
        engine = self.engine(ask(0, self.REPEATS))
        engine.step(t0=3)
        assert self.drafted(engine, t0=[9]) == {0: [4]}
        assert self.drafted(engine, t0=1) == {}

    def test_tokens_after_the_end_are_dropped(self):
        request = ask(0, self.REPEATS, params={"stop_token_ids": [4]})
        engine = self.engine(request)
        engine.step(t0=3)
        batch, sampled = engine.scheduler.schedule(), {request: [4, 1]}
        engine.scheduler.launched(batch)
        assert engine.scheduler.update(batch, sampled) == {request: STOP}
        assert sampled == {request: [4]}

    def test_tokens_before_the_end_are_kept(self):
        request = ask(0, self.REPEATS * 3, max_tokens=20, params={"stop_token_ids": [5]})
        engine = self.engine(request)
        engine.step(t0=3)
        self.drafted(engine, t0=[4, 1])
        batch, sampled = engine.scheduler.schedule(), {request: [2, 5, 3]}
        engine.scheduler.launched(batch)
        assert engine.scheduler.update(batch, sampled) == {request: STOP}
        assert sampled == {request: [2, 5]}

    @pytest.mark.parametrize(("max_tokens", "drafts"), [(4, 2), (3, 1), (2, 0)])
    def test_no_more_are_proposed_than_may_come(self, max_tokens, drafts):
        request = ask(0, self.REPEATS * 3, max_tokens=max_tokens)
        engine = self.engine(request)
        engine.step(t0=3)
        request.lookup = Repeats()
        batch = engine.scheduler.schedule()
        assert len(batch.drafts.get(request, [])) == drafts

    def test_they_begin_behind_the_least_number_of_tokens(self):
        engine = self.engine(ask(0, self.REPEATS, params={"min_tokens": 1}))
        engine.step(t0=3)
        assert self.drafted(engine) == {0: [4]}

    def test_they_take_a_new_block_only_where_each_that_runs_could_have_one(self):
        """Three tokens are in the first block: a draft of two needs another."""
        for free, drafts in ((2, 2), (1, 0)):
            request = ask(0, 2, max_tokens=8)
            engine = self.engine(request, blocks=3)
            engine.step()
            request.lookup = Repeats()
            while engine.pool.num_free > free:
                engine.pool.allocate(ask(9), SIZE)
            batch = engine.scheduler.schedule()
            assert len(batch.drafts.get(request, [])) == drafts
            assert len(request.block_table) == (2 if drafts else 1)

    def test_they_need_no_block_within_the_last_one(self):
        request = ask(0, 1, max_tokens=8)
        engine = self.engine(request, blocks=3)
        engine.step()
        request.lookup = Repeats()
        while engine.pool.num_free > 1:
            engine.pool.allocate(ask(9), SIZE)
        assert engine.scheduler.schedule().drafts == {request: [1, 1]}
        assert len(request.block_table) == 1

    def test_what_comes_of_them_is_learned(self):
        request = ask(0, self.REPEATS)
        engine = self.engine(request)
        engine.step(t0=3)
        request.lookup = Repeats()
        self.drafted(engine, t0=[1, 9])
        assert request.lookup.learned == [(2, 1, 9)]
        request.lookup.drafts = 0
        self.drafted(engine)
        assert len(request.lookup.learned) == 1, "a step without drafts teaches nothing"

    def test_an_accepted_draft_may_be_the_last_token(self):
        request = ask(0, self.REPEATS, max_tokens=3)
        engine = self.engine(request)
        engine.step(t0=3)
        assert engine.compute(engine.scheduler.schedule(), t0=[4, 1]) == {0: LENGTH}

    @pytest.mark.parametrize(("fields", "options"), [
        ({"max_tokens": 2}, {}),
        ({"params": {"min_tokens": 9}}, {}),
        ({"params": {"presence_penalty": 0.5}}, {}),
        ({}, {"speculative_tokens": 0}),
    ])  # fmt: skip
    def test_there_are_none(self, fields, options):
        """Where only one token may come, where earlier tokens change the next, and without the option."""
        engine = self.engine(ask(0, self.REPEATS, **fields), **options)
        engine.step(t0=3)
        batch = engine.scheduler.schedule()
        assert (told(batch), batch.drafts) == ({0: 1}, {})

    def test_there_are_none_behind_a_token_that_is_still_computed(self):
        request = ask(0, self.REPEATS)
        engine = self.engine(request)
        batch = engine.scheduler.schedule()
        engine.scheduler.launched(batch, [request])
        assert engine.scheduler.schedule().drafts == {}

    def test_they_leave_the_budget_to_others_that_decode(self):
        engine = self.engine(ask(0, self.REPEATS), ask(1, 2), max_num_batched_tokens=8, max_num_seqs=2)
        engine.step(t0=3)
        engine.change(max_num_batched_tokens=2, max_num_seqs=2)
        assert engine.step() == {0: 1, 1: 1}

    def test_one_fits_beside_another_that_decodes(self):
        engine = self.engine(ask(0, self.REPEATS), ask(1, 2), max_num_batched_tokens=8, max_num_seqs=3)
        engine.step(t0=3)
        engine.change(max_num_batched_tokens=3)
        assert engine.step(t0=[4, 1]) == {0: 2, 1: 1}

    def test_four_sequences_have_one_each(self):
        engine = self.engine(ask(0, self.REPEATS), *(ask(n, 2) for n in range(1, 4)))
        engine.step(t0=3)
        assert engine.step(t0=[4, 1]) == {0: 2, 1: 1, 2: 1, 3: 1}

    def test_many_sequences_have_none(self):
        engine = self.engine(ask(0, self.REPEATS), *(ask(n, 2) for n in range(1, 5)))
        engine.step(t0=3)
        assert engine.step() == dict.fromkeys(range(5), 1)


class TestOriginalLength:
    def test_a_sequence_that_passes_it_is_computed_again_from_its_beginning(self):
        request = ask(0, 6)
        engine = Engine(request, original_length=8, caching=True)
        assert engine.step() == {0: 6}
        assert engine.step() == {0: 1}
        short = list(request.block_hashes)
        assert not request.is_long
        assert engine.step() == {0: 1}  # the eighth token
        assert engine.step() == {0: 9}
        assert request.is_long
        assert engine.step() == {0: 1}
        assert request.block_hashes[0] != short[0]
        assert request.num_preemptions == 1

    def test_a_longer_prompt_is_long_at_once_and_shares_nothing_with_short_ones(self):
        engine = Engine(ask(0, range(8), max_tokens=1), original_length=8, caching=True)
        engine.step()
        longer = ask(1, range(9))
        engine.add(longer)
        assert (longer.is_long, longer.num_reusable_tokens) == (True, 0)
        assert engine.step() == {1: 9}
        again = ask(2, range(9))
        engine.add(again)
        assert again.num_reusable_tokens == 8

    def test_sequences_that_pass_it_share_what_one_of_them_computes_again(self):
        engine = Engine(ask(0, range(7)), ask(1, range(7)), original_length=8, caching=True)
        assert engine.step() == {0: 7}
        assert engine.step() == {0: 1, 1: 3}
        assert engine.step() == {1: 1, 0: 9}
        assert engine.step() == {0: 1, 1: 1}  # and eight tokens from the cache

    def test_an_unread_token_is_read_before_its_sequence_begins_again(self):
        request, other = ask(0, 8), ask(1, 2)
        engine = Engine(request, original_length=8)
        running = engine.scheduler.schedule()
        engine.scheduler.launched(running, [request])
        engine.add(other)
        assert engine.plan() == {}
        assert engine.waiting == [0, 1]
        assert engine.scheduler.update(running, {request: [7]}) == {}
        assert engine.step() == {0: 9, 1: 2}

    def test_one_that_ends_with_its_unread_token_goes_on(self):
        request = ask(0, 8, max_tokens=1)
        engine = Engine(request, original_length=8)
        running = engine.scheduler.schedule()
        engine.scheduler.launched(running, [request])
        engine.add(ask(1, 2))
        assert engine.plan() == {1: 2}
        assert (engine.running, request.num_preemptions) == ([0, 1], 0)

    def test_drafts_end_at_it(self):
        prompt = [1, 2, 3, 4, 5] * 4
        counts = {}
        for length in (21, 22, 100):
            engine = Engine(ask(0, prompt, max_tokens=20), original_length=length, speculative_tokens=4)
            engine.step(t0=1)
            counts[length] = engine.step()[0]
        assert counts == {21: 1, 22: 2, 100: 2}
