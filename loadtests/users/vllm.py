"""A user of vLLM's own fields of completions."""

from __future__ import annotations

from typing import Any

from loadtests.users.base import Answer, Question
from loadtests.users.http import data
from loadtests.users.openai import OpenAICompletionStreamUser


class VLLMStreamUser(OpenAICompletionStreamUser):
    """Token ids come with the text and are counted; the usage must say the same."""

    def body(self, question: Question) -> dict[str, Any]:
        return {
            **super().body(question),
            "min_tokens": question.output_tokens,
            "top_k": 8,
            "min_p": 0.0,
            "repetition_penalty": 1.05,
            "skip_special_tokens": False,
            "return_token_ids": True,
        }

    def read(self, frame: bytes, answer: Answer) -> None:
        if b'"choices":[]' in frame:
            stated = data(frame)["usage"]["completion_tokens"]
            if stated != answer.tokens:
                answer.lost = f"{answer.tokens} ids, and a usage of {stated} tokens"
        elif b'"choices":[{' in frame:
            answer.piece(sum(len(choice.get("token_ids") or ()) for choice in data(frame)["choices"]))
        else:
            super().read(frame, answer)
