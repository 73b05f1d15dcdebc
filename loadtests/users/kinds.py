"""Users of OpenAI's dialect with another kind of work: large batches, long prompts, conversations that grow."""

from __future__ import annotations

from typing import Any

from loadtests.current import CURRENT
from loadtests.plan import Work
from loadtests.prompts import next_prompt, words
from loadtests.samples import Outcome, Sample
from loadtests.users.base import Answer, Question
from loadtests.users.http import data
from loadtests.users.openai import (
    OpenAIChatStreamUser,
    OpenAICompletionStreamUser,
    OpenAICompletionUser,
    completion,
)


class EngineUser(OpenAICompletionUser):
    """One whole answer to many prompts, which costs the server hardly more than the engine's own work."""

    MOST = 32

    def question(self, work: Work) -> Question:
        """`turns` of the work is the number of prompts."""
        return Question("", work.output_tokens * work.turns, turn=work.turns)

    def body(self, question: Question) -> dict[str, Any]:
        work = CURRENT.order().stage.work
        prompts = [next_prompt(work) for _ in range(question.turn)]
        return {**completion(question), "prompt": prompts, "max_tokens": question.output_tokens // question.turn}


class LongPromptUser(OpenAICompletionStreamUser):
    """Prompts of `common_words`, all of them its own, and short answers."""

    def question(self, work: Work) -> Question:
        return Question(words(work.common_words), max(1, work.output_tokens // 4))


class ShortPromptUser(OpenAICompletionStreamUser):
    """Prompts without the words that others share: the neighbour of long ones."""

    def question(self, work: Work) -> Question:
        return Question(words(work.prompt_words), work.output_tokens)


class ChatSessionUser(OpenAIChatStreamUser):
    """A conversation in which each question follows all that was said before."""

    def on_start(self) -> None:
        """A first conversation."""
        self._messages: list[dict[str, str]] = []

    def question(self, work: Work) -> Question:
        if len(self._messages) >= 2 * work.turns:
            self._messages = []
        self._messages.append({"role": "user", "content": words(work.prompt_words)})
        return Question("", work.output_tokens, messages=list(self._messages), turn=(len(self._messages) + 1) // 2)

    def read(self, frame: bytes, answer: Answer) -> None:
        super().read(frame, answer)
        if self.has_text(frame):
            answer.text.append(data(frame)["choices"][0]["delta"]["content"])

    def heard(self, question: Question, answer: Answer, sample: Sample) -> None:
        if sample.outcome is Outcome.OK:
            self._messages.append({"role": "assistant", "content": "".join(answer.text)})
        else:
            self._messages = []


class ProbeUser(ShortPromptUser):
    """Looks how the server does: one short stream after another, with pauses that the stage says."""


class BadBodyUser(OpenAICompletionUser):
    """Bodies that must be refused with a status of 400 to 499."""

    exact = False
    rest_s = 0.2
    BODIES: tuple[dict[str, Any], ...] = (
        {"prompt": 5},
        {"prompt": "x", "n": 0},
        {"prompt": "x", "max_tokens": -1},
        {"prompt": "x", "temperature": "hot"},
        {"messages": 1},
        {},
    )

    def body(self, question: Question) -> dict[str, Any]:
        return dict(self._rng.choice(self.BODIES))

    def receive(self, response: Any, answer: Answer) -> None:
        super().receive(response, answer)
        if answer.status.startswith("4") and not answer.refused:
            answer.status, answer.ended, answer.tokens = self.good_status, True, 1

    def read(self, data: bytes, answer: Answer) -> None:
        """It was answered, which is wrong."""
        answer.detail = "to a body that makes no sense"
