"""Servers in turn: who is measured when, which runs count, and what happens to a server that fails. It installs nothing."""

from __future__ import annotations

import asyncio
import datetime
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.accounting import Meter, Usage, idle_cores, wait_quiet
from benchmarks.client import Answer, AnswerError, Question, ask
from benchmarks.loads import Case, Load, User, Words, drive
from benchmarks.records import Context, Failed, Results, Run, Started, figures
from benchmarks.servers import Server, StartError

SHORT_TOKENS, LONG_TOKENS = 16, 512
"""Lengths for warming up."""
IDLE_CORES = 0.1
"""A server that uses more than this without requests is stopped while others are measured."""
MOST_FAILURES = 3
"""After these a server is given up for its shape."""
FAILURES = (StartError, AnswerError, TimeoutError)


@dataclass(frozen=True)
class Rules:
    """When a run counts, and how long it may take."""

    max_other_cores: float
    repeats: int
    quiet_timeout_s: float
    run_timeout_s: float
    idle_window_s: float = 3.0


Measure = Callable[[Server, Load, float], tuple[list[Answer], Usage]]


def measure(server: Server, load: Load, timeout_s: float) -> tuple[list[Answer], Usage]:
    """One run; raises AnswerError or TimeoutError."""

    async def send(question: Question) -> Answer:
        return await ask(question, server.address)

    async def run() -> tuple[list[Answer], Usage]:
        async with asyncio.timeout(timeout_s):
            for question in load.before:
                await send(question)
            meter = Meter(server.pid)
            answers = await drive(load, send)
            return answers, meter.read()

    return asyncio.run(run())


class Turns:
    """The servers of one shape. Each case goes round all servers; another one begins in each round."""

    def __init__(
        self, context: Context, servers: dict[str, tuple[Server, dict[str, str]]], words: Words, results: Results,
        rules: Rules, seed: int, measure: Measure = measure,
    ) -> None:  # fmt: skip
        self._context, self._words, self._results, self._rules = context, words, results, rules
        self._servers = {name: server for name, (server, _) in servers.items()}
        self._versions = {name: versions for name, (_, versions) in servers.items()}
        self._seed, self._measure = seed, measure
        self._warm: set[str] = set()
        self._held: set[str] = set()
        self._failures: Counter[str] = Counter()

    def run(self, cases: list[Case], rounds: int) -> None:
        """Everything that is not among the results; whatever fails is left out and recorded."""
        warm = self._warming(cases)
        for server in self._servers.values():
            if any(self._missing(server, case, number) for case in cases for number in range(rounds)):
                self._ready(server, warm)
        names = list(self._servers)
        for number in range(rounds):
            first = number % len(names)
            for case in cases:
                for name in names[first:] + names[:first]:
                    self._turn(self._servers[name], case, number, warm)

    def stop(self) -> None:
        """End all servers."""
        for server in self._servers.values():
            server.stop()

    def _missing(self, server: Server, case: Case, number: int) -> bool:
        runs = self._results.runs(self._context, server.name, case.name, case.work, number)
        return all(run.disturbed for run in runs)

    def _turn(self, server: Server, case: Case, number: int, warm: Load) -> None:
        """Measure until a run is undisturbed, or often enough."""
        if not self._missing(server, case, number) or not self._ready(server, warm):
            return
        if server.name in self._held:
            server.release()
        try:
            repeats = 0
            while self._attempt(server, case, number).disturbed and repeats < self._rules.repeats:
                wait_quiet(server.pid, self._rules.max_other_cores, self._rules.quiet_timeout_s)
                repeats += 1
        except FAILURES as error:
            self._fail(server, "run", error, case.name, number)
        else:
            if server.name in self._held:
                server.hold()

    def _attempt(self, server: Server, case: Case, number: int) -> Run:
        attempt = len(self._results.runs(self._context, server.name, case.name, case.work, number))
        load = case.make(self._words, random.Random(f"{self._seed}/{number}/{case.name}/{attempt}"))
        answers, usage = self._measure(server, load, self._rules.run_timeout_s)
        run = Run(
            context=self._context, server=server.name, date=now(), versions=self._versions[server.name],
            case=case.name, work=case.work, users=case.users, in_curve=case.in_curve, round=number, attempt=attempt,
            seed=self._seed, disturbed=usage.other_cores > self._rules.max_other_cores,
            figures=figures(answers, usage.wall_s), usage=usage,
        )  # fmt: skip
        self._results.add(run)
        print(line(run), flush=True)
        return run

    def _ready(self, server: Server, warm: Load) -> bool:
        """Start it and warm it if need be; whether it can be measured."""
        if self._failures[server.name] >= MOST_FAILURES:
            return False
        began = time.perf_counter()
        try:
            if not server.ensure() and server.name in self._warm:
                return True
            start_s = time.perf_counter() - began
            self._measure(server, warm, self._rules.run_timeout_s)
        except FAILURES as error:
            self._fail(server, "start", error)
            return False
        idle = idle_cores(server.pid, self._rules.idle_window_s)
        held = idle > IDLE_CORES and server.hold()
        self._warm.add(server.name)
        if held:
            self._held.add(server.name)
        started = Started(
            context=self._context, server=server.name, date=now(), versions=self._versions[server.name],
            command=server.command, start_s=start_s, idle_cores=idle, held=held,
        )  # fmt: skip
        self._results.add(started)
        print(f"{self._context.shape} {server.name}: ready after {start_s:.0f} s, idle at {idle:.2f} cores", flush=True)
        return True

    def _fail(self, server: Server, stage: str, error: Exception, case: str = "", number: int = -1) -> None:
        """Record it. The server begins anew at its next turn, because it may still work on what was given up."""
        text = f"{type(error).__name__}: {error}"
        self._results.add(Failed(self._context, server.name, now(), stage, text, case, number))
        print(f"{self._context.shape} {server.name} {stage} {case}: {text}", flush=True)
        self._failures[server.name] += 1
        self._warm.discard(server.name)
        self._held.discard(server.name)
        server.stop()

    def _warming(self, cases: list[Case]) -> Load:
        """As many users as ever, and a prompt that is not short."""
        rng = random.Random(f"{self._seed}/warm")
        lengths = [LONG_TOKENS, *[SHORT_TOKENS] * max(case.users for case in cases)]
        return Load([User([self._words.question(self._words.draw(rng, length), SHORT_TOKENS)]) for length in lengths])


def now() -> str:
    """The date and time, in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def line(run: Run) -> str:
    """A run in a few words."""
    seen, used = run.figures, run.usage
    return (
        f"{run.context.shape} {run.case} round {run.round} {run.server}: {seen.tokens_per_s:.1f} tok/s, "
        f"{seen.user_tokens_per_s or 0:.1f} a user, TTFT {seen.ttft_p50_ms:.0f} ms, longest gap {seen.gap_longest_ms:.0f} ms, "
        f"others {used.other_cores:.2f} cores{', disturbed' if run.disturbed else ''}"
    )
