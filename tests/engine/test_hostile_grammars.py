"""Grammars that crash, never end, or grow: each costs the requests that have it, and nobody else anything."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec
import pytest
from llguidance import LLMatcher

from engine.failures import FailureCode
from engine.grammar import processes, serve, template, wire
from engine.grammar.source import source
from engine.messages import frame
from engine.sampling.params import Grammar
from tests.conftest import DEMO
from tests.engine.engines import Driver, core, prompts
from tests.live import wait_until

AMBIGUOUS = Grammar("grammar", 'start: s\ns: s s | s s s | /[a-z ]/ | ""')
QUICK = Grammar("regex", "([a-z]{2,9} ){500}")
FIRST, SECOND = prompts(1700, (9, 9))


def chain(count: int, bare: bool) -> Grammar:
    """A schema whose references lead to each other."""

    def refer(i: int) -> dict[str, object]:
        reference = {"$ref": f"#/$defs/a{i}"}
        return reference if bare else {"type": "object", "properties": {"x": reference}}

    definitions = {f"a{i}": refer(i + 1) for i in range(count)} | {f"a{count}": {"type": "string"}}
    return Grammar("json_schema", json.dumps({"$ref": "#/$defs/a0", "$defs": definitions}))


def rules(count: int, rule: str) -> Grammar:
    """Lark rules that lead to each other."""
    lines = (rule.format(i=i, next=i + 1) for i in range(count))
    return Grammar("grammar", "start: a0\n" + "\n".join(lines) + f'\na{count}: "x"')


HOSTILE = {
    "references": chain(1250, bare=False),
    "many references": chain(10_000, bare=False),
    "bare references": chain(10_000, bare=True),
    "rules": rules(4000, "a{i}: a{next}"),
    "rules to the left": rules(3000, 'a{i}: a{next} "y" | "z"'),
    "rules to the right": rules(3000, 'a{i}: "y" a{next} | "z"'),
    "nested anyOf": Grammar("json_schema", '{"anyOf": [' * 60 + '{"type": "string"}' + ', {"type": "null"}]}' * 60),
    "nested arrays": Grammar("json_schema", '{"type": "array", "items": ' * 5000 + "{}" + "}" * 5000),
    "repetition": Grammar("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "classes": Grammar("regex", r"(\p{L}|\w|\p{Lu}{1,50}){1,2000}"),
    "parentheses": Grammar("regex", "(" * 30_000 + "a" + ")" * 30_000),
    "parentheses in rules": Grammar("grammar", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "parentheses of GBNF": Grammar("grammar", "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "rules of GBNF": Grammar("grammar", "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(3000))),
    "enum": Grammar("json_schema", json.dumps({"enum": [f"value {i}" for i in range(100_000)]})),
    "itself": Grammar("json_schema", '{"$ref": "#"}'),
    "itself to the left": Grammar("grammar", 'start: start "x" | start'),
    "ambiguous": AMBIGUOUS,
}


@pytest.fixture(scope="module")
def engine():
    engine = core(DEMO, max_model_len=256, threads=1)
    yield engine
    engine.close()


@pytest.fixture
def driver(engine):
    """Without processes, or memories, of the tests before."""
    grammars = engine.grammars
    for process in [*grammars._live.values()]:
        grammars._drop(process)
    grammars._bad.clear()
    driver = Driver(engine)
    if grammars._open.template is not None:
        wait_until(lambda: not pids_of(driver))
    return driver


@pytest.fixture(scope="module")
def alone(engine):
    """What the second prompt says where nobody else is."""
    driver = Driver(engine)
    driver.submit(0, SECOND, max_tokens=20, ignore_eos=True)
    driver.run()
    return driver.tokens(0)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_followed_or_refused_and_nobody_else_notices(driver, alone, name):
    driver.submit(0, FIRST, max_tokens=4, ignore_eos=True, grammar=HOSTILE[name])
    driver.submit(1, SECOND, max_tokens=20, ignore_eos=True)
    driver.submit(2, SECOND, max_tokens=5, ignore_eos=True, grammar=QUICK)
    driver.run()
    assert driver.tokens(1) == alone
    assert driver.finish_reason(2) == "length"
    if driver.finish_reason(0) == "error":
        error = driver.outputs[0][-1].error
        assert error.code is FailureCode.GRAMMAR
        assert "panic" not in error.facts["reason"]
        assert "backtrace" not in error.facts["reason"]
    else:
        assert driver.tokens(0)


def pids_of(driver: Driver) -> list[int]:
    """Of the grammar processes, oldest first."""
    template = driver.engine.grammars._open.template.pid
    return sorted(int(pid) for pid in Path(f"/proc/{template}/task/{template}/children").read_text().split())


def run_until(driver: Driver, condition) -> None:
    while not condition():
        assert driver.engine.has_work
        driver.step()


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
def test_a_process_that_dies_costs_the_requests_of_its_grammar_alone(driver, number):
    driver.submit(2, SECOND, max_tokens=200, ignore_eos=True, grammar=Grammar("regex", "([a-z]{3} ){500}"))
    run_until(driver, lambda: driver.tokens(2))
    others = pids_of(driver)
    driver.submit(0, FIRST, max_tokens=200, ignore_eos=True, grammar=QUICK)
    driver.submit(1, SECOND, max_tokens=200, ignore_eos=True)
    run_until(driver, lambda: driver.tokens(0))
    (victim,) = set(pids_of(driver)) - set(others)
    os.kill(victim, number)
    driver.run()
    assert driver.finish_reason(0) == "error"
    assert driver.outputs[0][-1].error.code is FailureCode.GRAMMAR
    assert [len(driver.tokens(i)) for i in (1, 2)] == [200, 200]
    driver.submit(3, FIRST, max_tokens=5, ignore_eos=True, grammar=QUICK)  # its grammar is not to blame yet
    driver.run()
    assert len(driver.tokens(3)) == 5


@pytest.mark.parametrize("body", [b"\xc1", msgspec.msgpack.encode(wire.Followed([(77, False, None)], 0.0))])
def test_a_process_that_sends_no_message_costs_the_requests_of_its_grammar_alone(driver, monkeypatch, body):
    driver.submit(0, FIRST, max_tokens=200, ignore_eos=True, grammar=QUICK)
    driver.submit(1, SECOND, max_tokens=50, ignore_eos=True)
    run_until(driver, lambda: driver.tokens(0))
    (process,) = driver.engine.grammars._live.values()
    monkeypatch.setattr(process.received, "feed", lambda data: [body])
    driver.run()
    assert driver.finish_reason(0) == "error"
    assert driver.outputs[0][-1].error.code is FailureCode.GRAMMAR
    assert len(driver.tokens(1)) == 50


def test_a_template_that_dies_is_replaced(driver):
    driver.submit(0, FIRST, max_tokens=200, ignore_eos=True, grammar=QUICK)
    run_until(driver, lambda: driver.tokens(0))
    template = driver.engine.grammars._open.template
    template.kill()
    template.wait()
    driver.submit(1, SECOND, max_tokens=30, ignore_eos=True)
    driver.run()
    assert driver.finish_reason(0) == "error"
    assert len(driver.tokens(1)) == 30
    driver.engine.grammars._started_template = float("-inf")
    driver.submit(2, FIRST, max_tokens=5, ignore_eos=True, grammar=QUICK)
    driver.run()
    assert len(driver.tokens(2)) == 5


def test_a_mask_that_does_not_come_costs_its_own_requests_alone(driver):
    """Its process is stopped, so its mask takes for ever; the others' steps go on, and then it goes on itself."""
    driver.submit(0, FIRST, max_tokens=50, ignore_eos=True, grammar=QUICK)
    run_until(driver, lambda: len(driver.tokens(0)) >= 3)
    (stopped,) = pids_of(driver)
    os.kill(stopped, signal.SIGSTOP)
    driver.submit(1, SECOND, max_tokens=30, ignore_eos=True)
    driver.submit(2, SECOND, max_tokens=50, ignore_eos=True, grammar=Grammar("regex", "([a-z]{3} ){500}"))
    run_until(driver, lambda: 1 not in {key for _, key in driver.engine.requests})
    run_until(driver, lambda: 2 not in {key for _, key in driver.engine.requests})
    before = len(driver.tokens(0))
    assert before < 6
    os.kill(stopped, signal.SIGCONT)
    driver.run()
    assert len(driver.tokens(0)) == 50
    undisturbed = Driver(driver.engine)
    undisturbed.submit(0, FIRST, max_tokens=50, ignore_eos=True, grammar=QUICK)
    undisturbed.run()
    assert driver.tokens(0) == undisturbed.tokens(0)


def test_a_mask_that_takes_too_long_ends_its_own_request(driver, monkeypatch):
    driver.submit(0, FIRST, max_tokens=50, ignore_eos=True, grammar=QUICK)
    run_until(driver, lambda: driver.tokens(0))
    for pid in pids_of(driver):
        os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr("engine.grammar.processes.MASK_S", 0.0)
    driver.submit(1, SECOND, max_tokens=20, ignore_eos=True)
    driver.run()
    assert driver.finish_reason(0) == "error"
    assert "time" in driver.outputs[0][-1].error.facts["reason"]
    assert len(driver.tokens(1)) == 20


def test_masks_that_take_too_long_together_end_their_request(monkeypatch):
    """In this process, as the limit is the grammar process's own."""
    tokenizer = template._load(wire.Load(str(DEMO / "tokenizer.json"), 1, []))
    (token,) = tokenizer.tokenize_str("a")
    compiled = LLMatcher(tokenizer, source("regex", "a+"))
    followers = {}
    masks = serve._Masks(os.memfd_create("masks"), 4 * -(-tokenizer.vocab_size // 32))
    for limit, error in ((60.0, None), (0.0, serve.TOO_SLOW)):
        monkeypatch.setattr(serve, "REQUEST_CPU_S", limit)
        (answer,) = serve._follow(wire.Follow([], [(1, [token])]), compiled, followers, masks)
        assert answer.rows == [(1, False, error)]


def test_a_slow_compilation_does_not_delay_the_next(driver):
    """More than may be young at once, all stopped in the middle; a further grammar is compiled beside them."""
    for i in range(3):
        driver.submit(i, FIRST, max_tokens=5, grammar=Grammar("regex", f"x{i}((a{{1,999}}){{1,999}}){{1,999}}"))
    grammars = driver.engine.grammars
    run_until(driver, lambda: len(pids_of(driver)) == 3)
    for pid in pids_of(driver):
        os.kill(pid, signal.SIGSTOP)
    driver.submit(9, SECOND, max_tokens=5, ignore_eos=True, grammar=QUICK)
    run_until(driver, lambda: 9 not in {key for _, key in driver.engine.requests})
    assert driver.finish_reason(9) == "length"
    driver.engine.abort(1, [0, 1, 2])
    driver.run()
    assert grammars.users == 0


def test_an_aborted_compilation_is_ended(driver):
    driver.submit(0, FIRST, max_tokens=5, grammar=HOSTILE["many references"])
    run_until(driver, lambda: pids_of(driver))
    for pid in pids_of(driver):
        os.kill(pid, signal.SIGSTOP)
    driver.engine.abort(1, [0])
    driver.run()
    driver.engine.grammars.poll()
    wait_until(lambda: not pids_of(driver))
    assert not driver.engine.grammars._known


def test_a_grammar_that_keeps_crashing_is_not_tried_for_ever(driver):
    first = driver.engine.grammars._next_number
    for i in range(3):
        driver.submit(i, FIRST, max_tokens=5, grammar=HOSTILE["many references"])
        if i < 2:
            run_until(driver, lambda: pids_of(driver))
            for pid in pids_of(driver):
                os.kill(pid, signal.SIGSEGV)
            wait_until(lambda: not pids_of(driver))
        driver.run()
        assert driver.finish_reason(i) == "error"
    assert driver.engine.grammars._next_number == first + 2, "the third was refused without a process"


def test_memory_is_watched_however_many_messages_come(monkeypatch):
    """In this process: a message for each time that it waits for one."""
    ours, theirs = socket.socketpair()
    watches, ended = [], frame(wire.Kill(0))
    with ours, theirs:
        watched = template.Template(theirs)

        def watch() -> None:
            watches.append(1)
            if len(watches) == 3:
                ours.shutdown(socket.SHUT_WR)

        def receive(received=watched._receive) -> bool:
            if len(watches) < 3:
                ours.sendall(ended)
            return received()

        monkeypatch.setattr(watched, "_watch", watch)
        monkeypatch.setattr(watched, "_receive", receive)
        monkeypatch.setattr(watched, "_reap", lambda: None)
        watched._children[os.getpid()] = template._Child(1)
        ours.sendall(ended)
        watched.run()
    assert len(watches) >= 3


def test_a_process_that_cannot_be_started_costs_its_grammar_alone(monkeypatch):
    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    ours, theirs = socket.socketpair()
    with ours, theirs:
        made = template.Template(theirs)
        made._tokenizer = object()
        monkeypatch.setattr(os, "fork", fork)
        mine, its = socket.socketpair()
        table = os.memfd_create("masks")
        made._fork(7, its.detach(), table)
        assert not made._children
        with mine:
            assert mine.recv(1) == b"", "its worker sees the end"
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(table)


def test_no_process_outlives_its_engine():
    driver = Driver(core(DEMO, max_model_len=256, threads=1))
    driver.submit(0, FIRST, max_tokens=5, ignore_eos=True, grammar=QUICK)
    run_until(driver, lambda: driver.tokens(0))
    processes = [driver.engine.grammars._open.template.pid, *pids_of(driver)]
    driver = None
    gc.collect()
    wait_until(lambda: not any(running(pid) for pid in processes))


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_is_in_use_bounds_what_is_kept(driver, monkeypatch):
    monkeypatch.setattr("engine.grammar.processes.MAX_PROCESSES", 2)
    for i in range(5):
        driver.submit(i, FIRST, max_tokens=5, ignore_eos=True, grammar=Grammar("regex", f"{i}([a-z] ){{500}}"))
    while driver.engine.has_work:
        driver.step()
        assert len(driver.engine.grammars._live) <= 2
    assert [driver.finish_reason(i) for i in range(5)] == ["length"] * 5


def test_limits_stand_in_every_process(driver):
    driver.submit(0, FIRST, max_tokens=50, ignore_eos=True, grammar=QUICK)
    run_until(driver, lambda: driver.tokens(0))
    (pid,) = pids_of(driver)
    limits = Path(f"/proc/{pid}/limits").read_text()
    space = next(line for line in limits.splitlines() if line.startswith("Max address space")).split()[3]
    assert serve.MEMORY_BYTES < int(space) < 4 * serve.MEMORY_BYTES
    assert os.getpriority(os.PRIO_PROCESS, pid) >= serve.NICE
    assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000"
    links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    sockets = [link for link in links if link.startswith("socket:")]
    assert len(sockets) == 1, "a process has its own connection and nobody else's"
    driver.run()


def test_a_grammar_that_was_given_up_before_its_turn_can_be_asked_for_again(driver, monkeypatch):
    monkeypatch.setattr(processes, "MAX_YOUNG", 0)
    driver.engine.grammars.open(QUICK).close()
    monkeypatch.undo()
    driver.submit(0, FIRST, max_tokens=5, ignore_eos=True, grammar=QUICK)
    driver.run()
    assert len(driver.tokens(0)) == 5


def without_descriptors(monkeypatch, times: int) -> None:
    """So often the system has no descriptor left for a mask table."""
    made, left = os.memfd_create, [times]

    def memfd_create(name):
        if left[0] > 0:
            left[0] -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return made(name)

    monkeypatch.setattr(os, "memfd_create", memfd_create)


def test_idle_processes_make_room_where_descriptors_are_missing(driver, monkeypatch):
    for number in range(3):
        driver.submit(number, FIRST, max_tokens=5, grammar=Grammar("choice", f'["{number}"]'))
        driver.run()
    assert len(pids_of(driver)) == 3
    without_descriptors(monkeypatch, 2)
    driver.submit(3, FIRST, max_tokens=5, grammar=Grammar("choice", '["3"]'))
    driver.run()
    assert driver.finish_reason(3) == "stop"
    wait_until(lambda: len(pids_of(driver)) == 2)


def test_a_new_grammar_without_any_descriptor_may_come_again(driver, alone, monkeypatch):
    without_descriptors(monkeypatch, sys.maxsize)
    driver.submit(0, FIRST, max_tokens=5, grammar=Grammar("choice", '["a"]'))
    driver.submit(1, SECOND, max_tokens=20, ignore_eos=True)
    driver.run()
    failure = driver.outputs[0][-1].error
    assert (failure.code, failure.facts) == (FailureCode.OVERLOADED, {"wait_ms": 1000})
    assert driver.tokens(1) == alone


def test_processes_end_a_while_after_their_last_request(driver, monkeypatch):
    driver.submit(0, FIRST, max_tokens=5, grammar=Grammar("choice", '["a"]'))
    driver.run()
    driver.engine.refresh_stats()
    assert len(pids_of(driver)) == 1
    monkeypatch.setattr(processes, "IDLE_S", -1.0)
    driver.engine.refresh_stats()
    wait_until(lambda: not pids_of(driver))
    driver.submit(1, FIRST, max_tokens=5, grammar=Grammar("choice", '["a"]'))
    driver.run()
    assert driver.finish_reason(1) == "stop"
