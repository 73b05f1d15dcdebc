"""A scheduling policy is what decides, and nothing beside it: another one gives another order of the same requests."""

import ast
from bisect import insort
from pathlib import Path

import pytest

from engine import policies, quantization, registry
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.failures import Failure, FailureCode, FinishReason
from engine.gates.base import Gate
from engine.policies.base import policy as policy_of
from engine.policies.fair import Fair
from engine.policies.priority import Priority
from engine.request import Request
from engine.sampling.params import SamplingParams
from engine.scheduler import Scheduler


class ShortestFirst:
    """Gives way where it has most to lose."""

    def insert(self, request, requests):
        insort(requests, request, key=lambda r: len(r.token_ids))

    def served(self, requests, num_tokens):
        pass

    def startable(self, waiting, running):
        return [request for request in waiting if len(request.token_ids) < 50]

    def victim(self, running):
        return max(running, key=lambda r: r.num_computed_tokens)


def request(number: int, length: int, **fields) -> Request:
    return Request(
        (1, number), [number + 1] * length, SamplingParams(max_tokens=8, ignore_eos=True), arrival=number, **fields
    )


def scheduler(policy, blocks: int = 100, gates=(), **options) -> Scheduler:
    config = EngineConfig(model="none", block_size=4, **options)
    return Scheduler(config, BlockPool(blocks, 4, False), 4000, [], policy, gates)


def order(made: Scheduler) -> list[int]:
    return [r.key[1] for r in made.schedule().requests]


def test_smaller_priorities_first_then_who_came_first():
    made = scheduler(Priority(), blocks=500)
    for number, priority in enumerate((0, 2, -1, 0)):
        made.add(request(number, 5, priority=priority))
    assert order(made) == [2, 0, 3, 1]
    assert [r.key[1] for r in made.running] == [2, 0, 3, 1]


def test_another_policy_decides_who_starts():
    made = scheduler(ShortestFirst(), blocks=500)
    for number, length in enumerate((30, 5, 60, 12)):
        assert made.add(request(number, length)) is None
    assert order(made) == [1, 3, 0]
    assert [r.key[1] for r in made.waiting] == [2]


@pytest.mark.parametrize(("policy", "preempted"), [(Priority(), 2), (ShortestFirst(), 1)])
def test_the_policy_decides_who_gives_way(policy, preempted):
    """Three sequences, of which the first needs a block when the others have taken the last two."""
    made = scheduler(policy, blocks=15, max_num_batched_tokens=128)
    for number, length in enumerate((6, 31, 7)):
        assert made.add(request(number, length)) is None
    for _ in range(4):
        batch = made.schedule()
        if made.num_preemptions:
            break
        made.launched(batch)
        made.update(batch, {r: [9] for r in batch.requests})
    assert [r.key[1] for r in made.waiting] == [preempted]


class Closed(Gate):
    """Lets nobody pass but the one who has the key, and breaks for the last."""

    def may_start(self, request):
        return request.priority == 7

    def failures(self, requests):
        return [(request, Failure(FailureCode.STEP_FAILED)) for request in requests if request.key[1] == 2]


def test_a_gate_holds_up_only_whom_it_stops():
    made = scheduler(Priority(), gates=(Closed(),))
    for number, priority in enumerate((0, 7, 0)):
        made.add(request(number, 5, priority=priority))
    assert [(r.key[1], reason) for r, reason in made.expire(0.0)] == [(2, FinishReason.ERROR)]
    assert order(made) == [1]
    assert [r.key[1] for r in made.waiting] == [0]


def test_no_other_file_names_a_method_or_a_policy():
    """What such a name means stands in its own file."""
    root = Path(registry.__file__).parent
    names = {*quantization.NAMES, *policies.NAMES} - {quantization.NONE}
    for file in root.rglob("*.py"):
        folder = file.relative_to(root).parts[0]
        if folder not in ("quantization", "policies"):
            said = {node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)}
            assert not names & {value for value in said if isinstance(value, str)}, file


def test_names_are_those_of_files_and_others_are_refused():
    assert policies.NAMES == ("fair", "priority")
    assert quantization.NAMES == ("none", "int8")
    assert isinstance(policy_of("priority"), Priority)
    assert isinstance(policy_of(policies.DEFAULT), Fair)
    with pytest.raises(ModuleNotFoundError):
        registry.entry("policies", "luck")
