"""The client counts pieces of text and believes `usage` alone; loads are what their names say."""

from __future__ import annotations

import asyncio
import random

import pytest

from benchmarks.client import Address, AnswerError, Question, ask, body
from benchmarks.loads import POINTS, cases, closed, drive
from loadtests.server import free_port

QUESTION = Question([5, 6], " one two", 4)


def test_an_answer_has_a_time_for_each_piece_and_the_tokens_of_usage(fake):
    server = fake("fake")
    server.ensure()
    answer = asyncio.run(ask(QUESTION, server.address))
    assert answer.tokens == 4
    assert len(answer.times_s) == 4, "neither the end without text nor usage is a token"
    assert answer.sent_s < answer.times_s[0]
    assert answer.times_s == sorted(answer.times_s)


def test_a_refusal_is_no_answer(fake):
    server = fake("fake", "--refuse", "1")
    server.ensure()
    with pytest.raises(AnswerError, match="503: busy"):
        asyncio.run(ask(QUESTION, server.address))
    assert asyncio.run(ask(QUESTION, server.address)).tokens == 4


def test_an_answer_of_another_length_is_none(fake):
    server = fake("fake", "--short")
    server.ensure()
    with pytest.raises(AnswerError, match="usage says 3"):
        asyncio.run(ask(QUESTION, server.address))


def test_nobody_there_is_no_answer():
    with pytest.raises(AnswerError):
        asyncio.run(ask(QUESTION, Address(free_port(), "fake")))


def test_a_server_that_takes_only_text_gets_text():
    plain = body(QUESTION, Address(1, "fake", plain=True))
    assert b'"prompt":" one two"' in plain
    assert b"ignore_eos" not in plain
    assert b'"prompt":[5,6]' in body(QUESTION, Address(1, "fake"))


def test_prompts_have_the_same_length_as_text_and_differ_by_seed(words):
    case = closed("c2", 2, 32, 8)
    one, same, other = (case.make(words, random.Random(seed)) for seed in (1, 1, 2))
    assert one == same
    assert one != other
    assert [len(user.questions) for user in one.users] == [2, 2]
    assert all(len(question.prompt) == 32 for user in one.users for question in user.questions)


def test_every_case_can_be_made(words):
    made = cases([1, 4], list(POINTS), 2.0, 16, 8)
    assert [case.name for case in made] == ["c1", "c4", *POINTS]
    assert [case.in_curve for case in made] == [True, True, *[False] * len(POINTS)]
    loads = {case.name: case.make(words, random.Random(1)) for case in made}
    assert all(len(load.users) == case.users for case, load in zip(made, loads.values(), strict=True))
    common = loads["prefix"].before[0].prompt[:1000]
    assert all(user.questions[0].prompt[:1000] == common for user in loads["prefix"].users)
    first, second, *_ = loads["chats"].users[0].questions
    assert second.prompt[: len(first.prompt)] == first.prompt
    assert len(second.prompt) == len(first.prompt) + 128
    other = next(case for case in made if case.name == "open").make(words, random.Random(2))
    assert [user.delay_s for user in other.users] == [user.delay_s for user in loads["open"].users]
    assert other.users != loads["open"].users, "arrivals are the same in each round, prompts are not"


def test_a_user_sends_one_request_after_another_and_users_send_together(words):
    """Nobody gets an answer before both users have asked."""
    asked: list[Question] = []
    both = asyncio.Event()

    async def answer(question):
        asked.append(question)
        if len(asked) == 2:
            both.set()
        await both.wait()
        return question

    load = closed("c2", 2, 8, 1).make(words, random.Random(1))
    answers = asyncio.run(drive(load, answer))
    assert asked[:2] == [user.questions[0] for user in load.users]
    assert answers == [question for user in load.users for question in user.questions]


def test_the_first_failure_ends_a_run(words):
    async def fail(question):
        raise AnswerError("no")

    with pytest.raises(AnswerError, match="no"):
        asyncio.run(drive(closed("c2", 2, 8, 1).make(words, random.Random(1)), fail))
