"""What all users do: ask in the way of the current stage, check the answer, and record a sample of it."""

from __future__ import annotations

import random
import time
from abc import abstractmethod
from dataclasses import dataclass, field

import gevent
from locust import User, task

from loadtests.current import CURRENT, Order
from loadtests.plan import Work
from loadtests.prompts import next_adapter, next_prompt
from loadtests.samples import Outcome, Sample
from loadtests.settings import MODEL


@dataclass
class Question:
    """What is asked."""

    prompt: str
    output_tokens: int
    adapter: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    """Of a conversation; empty for a prompt alone."""
    turn: int = 0

    @property
    def model(self) -> str:
        """The adapter's name where there is one, as OpenAI's clients choose it."""
        return self.adapter or MODEL


@dataclass
class Answer:
    """What has come so far. `exact`: it must have all tokens that were asked for."""

    exact: bool
    begin: float = field(default_factory=time.perf_counter)
    at_s: float = field(default_factory=time.time)
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    ended: bool = False
    """The dialect's own end was there."""
    status: str = ""
    refused: bool = False
    told_when: bool = False
    lost: str = ""
    """Why there is no answer, for people."""
    detail: str = ""
    """What an error said, for people."""
    text: list[str] = field(default_factory=list)
    """Only of users that go on with it."""

    def piece(self, tokens: int = 0) -> None:
        """Text has come now, with so many tokens if the dialect says so."""
        self.times.append(time.perf_counter())
        self.tokens += tokens

    def sample(self, user: str, question: Question, good_status: str) -> Sample:
        """Judge it."""
        end = time.perf_counter()
        outcome, reason = self._outcome(question, good_status)
        return Sample(
            at_s=self.at_s,
            user=user,
            outcome=outcome,
            total_ms=(end - self.begin) * 1e3,
            ttft_ms=(self.times[0] - self.begin) * 1e3 if self.times else None,
            gaps_ms=[
                round((after - before) * 1e3, 3) for before, after in zip(self.times, self.times[1:], strict=False)
            ],
            tokens=self.tokens,
            status=self.status,
            told_when=self.told_when,
            turn=question.turn,
            reason=reason,
        )

    def _outcome(self, question: Question, good_status: str) -> tuple[Outcome, str]:
        if self.refused:
            return Outcome.REFUSED, self.detail
        if self.status not in ("", good_status):
            return Outcome.ERROR, f"status {self.status}: {self.detail}"
        if self.lost:
            return Outcome.LOST, self.lost
        if not self.ended:
            return Outcome.WRONG, f"no end after {self.tokens} tokens {self.detail}".strip()
        wanted = question.output_tokens
        if self.tokens != wanted if self.exact else not 0 < self.tokens <= wanted:
            return Outcome.WRONG, f"{self.tokens} tokens of {wanted}"
        return Outcome.OK, ""


class DialectUser(User):
    """A client of one dialect. In a closed loop it asks, waits for the answer and asks again; in an open one it asks at random
    times and never waits.
    """

    abstract = True
    good_status = "200"
    exact = True
    rest_s = 0.0
    """Between its requests in any closed loop, for users that would else send far more of them than others."""

    def __init__(self, environment: object) -> None:
        super().__init__(environment)
        self._next_s = 0.0
        self._asked = False
        self._rng = random.Random()

    def wait_time(self) -> float:
        """Before the next task."""
        order = CURRENT.order()
        if order.stage.times:
            # From the last arrival, not from now: the time that sending takes does not lower the rate.
            self._next_s = (self._next_s or time.perf_counter()) + self._rng.expovariate(order.rate_per_user)
            return max(0.0, self._next_s - time.perf_counter())
        return order.stage.seconds if order.stage.once else max(self.rest_s, order.stage.pause_s)

    @task
    def ask_next(self) -> None:
        """One request."""
        order = CURRENT.order()
        first, self._asked = not self._asked, True
        if not order.stage.times:
            if first or not order.stage.once:
                self.ask(order)
        elif not first:  # an arrival is after a wait
            CURRENT.pending.spawn(self.ask, order)

    def ask(self, order: Order) -> Sample:
        """Ask, and record what became of it."""
        question = self.question(order.stage.work)
        answer = Answer(self.exact)
        try:
            self.call(order, question, answer)
        except gevent.GreenletExit:
            answer.lost = "given up at the end of the run"
            CURRENT.collection.add(answer.sample(type(self).__name__, question, self.good_status))
            raise
        sample = answer.sample(type(self).__name__, question, self.good_status)
        CURRENT.collection.add(sample)
        self.heard(question, answer, sample)
        return sample

    def question(self, work: Work) -> Question:
        """The next question; chats and long prompts have their own."""
        return Question(next_prompt(work), work.output_tokens, next_adapter(work))

    def heard(self, question: Question, answer: Answer, sample: Sample) -> None:
        """After an answer, for users that go on with it."""

    @abstractmethod
    def call(self, order: Order, question: Question, answer: Answer) -> None:
        """Send the question and fill in the answer. Whatever goes wrong is told by the answer."""
