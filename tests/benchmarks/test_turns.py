"""Who is measured when: alternation, disturbed runs, servers that fail, and going on where the last call ended."""

from __future__ import annotations

from dataclasses import dataclass, field

import psutil
import pytest

from benchmarks.client import Address, AnswerError
from benchmarks.loads import closed
from benchmarks.records import Failed, Results, Run, Started
from benchmarks.servers import OwnServer, RunningServer, StartError
from benchmarks.turns import MOST_FAILURES, Rules, Turns
from tests.benchmarks.samples import CONTEXT, answers, usage
from tests.waiting import wait_until

RULES = Rules(max_other_cores=0.2, repeats=2, quiet_timeout_s=0, run_timeout_s=60, idle_window_s=0.05)
CASES = [closed("c1", 1, 4, 2, in_curve=True), closed("c2", 2, 4, 2, in_curve=True)]


@dataclass
class Servers:
    """Servers without processes, and what they were told."""

    names: list[str]
    log: list[str] = field(default_factory=list)
    others: dict[str, list[float]] = field(default_factory=dict)
    """Cores that others use in a server's next runs; nothing afterwards."""
    broken: dict[str, int] = field(default_factory=dict)
    """How many of a server's next runs fail; -1 for a server that does not start."""

    def turns(self, results: Results) -> Turns:
        servers = {name: (One(name, self), {"fake": "1"}) for name in self.names}
        return Turns(CONTEXT, servers, self.words, results, RULES, 1, self.measure)

    words = None

    def measure(self, server, load, timeout_s):
        warm = len(load.users[0].questions) == 1
        self.log.append(f"{'warm' if warm else len(load.users)} {server.name}")
        if not warm and self.broken.get(server.name, 0) > 0:
            self.broken[server.name] -= 1
            raise AnswerError("broken")
        others = self.others.get(server.name, [])
        return answers(), usage(others.pop(0) if others and not warm else 0.0)


class One:
    address = Address(1, "fake")
    pid = 1
    command = "fake"

    def __init__(self, name: str, servers: Servers) -> None:
        self.name, self._servers, self._runs = name, servers, False

    def ensure(self) -> bool:
        if self._servers.broken.get(self.name) == -1:
            raise StartError("it does not start")
        started, self._runs = not self._runs, True
        return started

    def hold(self) -> bool:
        self._servers.log.append(f"hold {self.name}")
        return True

    def release(self) -> None:
        self._servers.log.append(f"release {self.name}")

    def stop(self) -> None:
        self._runs = False


@pytest.fixture
def results(tmp_path) -> Results:
    return Results(tmp_path / "runs.jsonl")


@pytest.fixture(autouse=True)
def idle(monkeypatch) -> dict[int, float]:
    """What idle servers use."""
    found = {1: 0.0}
    monkeypatch.setattr("benchmarks.turns.idle_cores", lambda pid, seconds: found.get(pid, 0.0))
    return found


@pytest.fixture
def servers(words):
    def make(*names: str, **more) -> Servers:
        made = Servers(list(names), **more)
        made.words = words
        return made

    return make


def runs(results: Results) -> list[Run]:
    return [record for record in results.records if isinstance(record, Run)]


def test_servers_take_turns_and_another_begins_each_round(servers, results):
    some = servers("a", "b")
    some.turns(results).run(CASES, 2)
    assert some.log == ["warm a", "warm b", "1 a", "1 b", "2 a", "2 b", "1 b", "1 a", "2 b", "2 a"]
    assert [record.server for record in results.records if isinstance(record, Started)] == ["a", "b"]


def test_a_disturbed_run_is_repeated_and_stays_recorded(servers, results):
    servers("a", others={"a": [0.5]}).turns(results).run(CASES[:1], 1)
    assert [(run.attempt, run.disturbed, run.usage.other_cores) for run in runs(results)] == [
        (0, True, 0.5),
        (1, False, 0.0),
    ]


def test_a_run_that_stays_disturbed_is_given_up_and_tried_by_the_next_call(servers, results):
    servers("a", others={"a": [0.5] * 3}).turns(results).run(CASES[:1], 1)
    assert [run.disturbed for run in runs(results)] == [True] * (1 + RULES.repeats)
    servers("a").turns(Results(results.path)).run(CASES[:1], 1)
    last = runs(Results(results.path))[-1]
    assert (last.attempt, last.disturbed) == (3, False)


def test_the_next_call_measures_only_what_is_missing(servers, results):
    servers("a", "b").turns(results).run(CASES, 1)
    again = servers("a", "b")
    again.turns(Results(results.path)).run(CASES, 1)
    assert again.log == [], "no server is even asked"
    more = servers("a", "b", "c")
    more.turns(Results(results.path)).run(CASES, 1)
    assert more.log == ["warm c", "1 c", "2 c"]


def test_a_line_that_was_cut_off_is_measured_again(servers, results):
    servers("a").turns(results).run(CASES, 1)
    whole = results.path.read_bytes()
    results.path.write_bytes(whole[:-20])
    again = servers("a")
    again.turns(Results(results.path)).run(CASES, 1)
    assert again.log == ["warm a", "2 a"]
    assert len(runs(Results(results.path))) == 2


def test_a_server_that_does_not_start_loses_nothing_of_the_others(servers, results):
    servers("a", "b", broken={"a": -1}).turns(results).run(CASES, 1)
    failed = [record for record in results.records if isinstance(record, Failed)]
    assert {(record.server, record.stage) for record in failed} == {("a", "start")}
    assert len(failed) == MOST_FAILURES
    assert [run.server for run in runs(results)] == ["b", "b"]


def test_after_a_failed_run_the_server_starts_anew(servers, results):
    some = servers("a", broken={"a": 1})
    some.turns(results).run(CASES, 1)
    assert some.log == ["warm a", "1 a", "warm a", "2 a"]
    [failed] = [record for record in results.records if isinstance(record, Failed)]
    assert (failed.stage, failed.case, failed.round) == ("run", "c1", 0)


def test_a_server_that_is_busy_without_requests_is_held_while_others_run(servers, results, idle):
    idle[1] = 0.9
    some = servers("a", "b")
    some.turns(results).run(CASES[:1], 1)
    begin = ["warm a", "hold a", "warm b", "hold b"]
    assert some.log == [*begin, "release a", "1 a", "hold a", "release b", "1 b", "hold b"]
    assert all(record.held for record in results.records if isinstance(record, Started))


def test_real_processes_are_measured_started_again_and_ended(fake, words, results):
    server: OwnServer = fake("fake")
    turns = Turns(CONTEXT, {"fake": (server, {})}, words, results, RULES, 1)
    turns.run(CASES[:1], 1)
    first = psutil.Process(server.pid)
    first.kill()
    wait_until(lambda: first.status() == psutil.STATUS_ZOMBIE)
    turns.run(CASES, 1)
    assert {run.case for run in runs(results)} == {"c1", "c2"}
    assert [record.command for record in results.records if isinstance(record, Started)] == [server.command] * 2
    assert server.command.startswith("FAKE_SETTING=1 ")
    running = RunningServer("running", server.address)
    assert not running.ensure()
    turns.stop()
    with pytest.raises(StartError):
        running.ensure()
