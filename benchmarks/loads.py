"""The cases: which users send which requests. It knows no server and measures no time."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.client import Answer, Question

REQUESTS_PER_USER = 2
ARRIVALS_SEED = 7
"""Requests of the open loop arrive at the same times in every run."""
PREFIX_TOKENS = 1000
OPENING_TOKENS, TURN_TOKENS, TURNS = 256, 64, 4
OPEN_REQUESTS = 18


class Words:
    """Tokens that are one plain word each, so that a prompt has the same length as token ids and as text."""

    def __init__(self, tokenizer: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        size = self._tokenizer.get_vocab_size()
        self._texts = {i: text for i in range(size) if re.fullmatch(" [a-z]+", text := self._tokenizer.decode([i]))}
        self._ids = [i for i, text in self._texts.items() if self._encode(text) == [i]]

    def draw(self, rng: random.Random, length: int) -> list[int]:
        """Random token ids."""
        return rng.choices(self._ids, k=length)

    def question(self, prompt: list[int], tokens: int) -> Question:
        """A request with this prompt; raises ValueError if its text has other tokens."""
        text = "".join(self._texts[i] for i in prompt)
        if self._encode(text) != prompt:
            raise ValueError("the words run together with this tokenizer")
        return Question(prompt, text, tokens)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


@dataclass
class User:
    """Sends its questions one after another; the first so many seconds after the start."""

    questions: list[Question]
    delay_s: float = 0.0


@dataclass
class Load:
    """What a run sends: questions before the clock starts, and users."""

    users: list[User]
    before: list[Question] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """A load by name. `work` says its sizes: figures of different work are never put together."""

    name: str
    work: str
    users: int
    make: Callable[[Words, random.Random], Load]
    in_curve: bool = False


Ask = Callable[[Question], Awaitable[Answer]]


async def drive(load: Load, ask: Ask) -> list[Answer]:
    """Let all users send; the answers of all. The first failure ends the run."""

    async def run(user: User) -> list[Answer]:
        await asyncio.sleep(user.delay_s)
        return [await ask(question) for question in user.questions]

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(run(user)) for user in load.users]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [answer for task in running for answer in task.result()]


def closed(name: str, users: int, prompt: int, output: int, in_curve: bool = False) -> Case:
    """So many users; each sends its next request when the last has ended."""
    each = max(REQUESTS_PER_USER, 4 // users)

    def make(words: Words, rng: random.Random) -> Load:
        return Load(
            [User([words.question(words.draw(rng, prompt), output) for _ in range(each)]) for _ in range(users)]
        )

    return Case(name, f"{users} users, each {each} x {prompt} -> {output}", users, make, in_curve)


def mixed() -> Case:
    """16 users with prompts of 16 to 512 tokens and outputs of 8 to 256."""
    users, each = 16, 3

    def make(words: Words, rng: random.Random) -> Load:
        lengths = [(16 << (i % 6), 8 << (i * 5 % 6)) for i in range(users * each)]
        every = [words.question(words.draw(rng, prompt), output) for prompt, output in lengths]
        return Load([User(every[i::users]) for i in range(users)])

    return Case("mixed", f"{users} users, each {each} x 16..512 -> 8..256", users, make)


def prefix() -> Case:
    """Prompts that begin with the same tokens, which the server has computed before."""
    users, own, output = 8, 16, 32

    def make(words: Words, rng: random.Random) -> Load:
        common = words.draw(rng, PREFIX_TOKENS)
        before = words.question(common + words.draw(rng, own), 1)
        return Load(
            [User([words.question(common + words.draw(rng, own), output)]) for _ in range(users)], before=[before]
        )

    return Case("prefix", f"{users} users, each 1 x ({PREFIX_TOKENS} shared + {own}) -> {output}", users, make)


def chats() -> Case:
    """Conversations: a turn's prompt is the last turn's prompt, an answer and a new question.

    The answers in it are of the client's making, with as many tokens as the server's: random models' texts have other
    tokens when they are encoded again.
    """
    users = 4

    def make(words: Words, rng: random.Random) -> Load:
        return Load([User(_conversation(words, rng)) for _ in range(users)])

    work = f"{users} users, each {TURNS} turns: {OPENING_TOKENS} + {2 * TURN_TOKENS} a turn -> {TURN_TOKENS}"
    return Case("chats", work, users, make)


def _conversation(words: Words, rng: random.Random) -> list[Question]:
    history, turns = words.draw(rng, OPENING_TOKENS), []
    for _ in range(TURNS):
        prompt = history + words.draw(rng, TURN_TOKENS)
        turns.append(words.question(prompt, TURN_TOKENS))
        history = prompt + words.draw(rng, TURN_TOKENS)
    return turns


def arrivals(rate: float) -> Case:
    """An open loop: requests come at random times, however busy the server is."""

    def make(words: Words, rng: random.Random) -> Load:
        clock, delay_s, users = random.Random(ARRIVALS_SEED), 0.0, []
        for i in range(OPEN_REQUESTS):
            question = words.question(words.draw(rng, 64 << (i % 5)), 16 << (i * 5 % 4))
            users.append(User([question], delay_s))
            delay_s += clock.expovariate(rate)
        return Load(users)

    return Case("open", f"{OPEN_REQUESTS} x 64..1024 -> 16..128, {rate:g} a second", OPEN_REQUESTS, make)


POINTS = ("long", "prefix", "chats", "open", "mixed")


def cases(streams: list[int], points: list[str], rate: float, prompt: int, output: int) -> list[Case]:
    """The curve's cases and the named points, in this order."""
    made = {
        "long": lambda: closed("long", 4, 1024, 32),
        "prefix": prefix,
        "chats": chats,
        "open": lambda: arrivals(rate),
        "mixed": mixed,
    }
    curve = [closed(f"c{users}", users, prompt, output, in_curve=True) for users in streams]
    return [*curve, *(made[name]() for name in points)]
