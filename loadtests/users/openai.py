"""A user of the OpenAI dialect's streams."""

from __future__ import annotations

from locust import constant, task

from loadtests.prompts import next_prompt
from loadtests.settings import SETTINGS
from loadtests.stream import StreamUser, data


class OpenAIStreamUser(StreamUser):
    """Streams completions with their usage."""

    wait_time = constant(0)

    @task
    def completion(self) -> None:
        """One stream of a fixed length."""
        body = {
            "model": SETTINGS.model,
            "prompt": next_prompt(),
            "max_tokens": SETTINGS.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self.read_stream("/v1/completions", body, "openai /v1/completions", b"data: [DONE]")

    def carries_text(self, frame: bytes) -> bool:
        """Every chunk with a choice has a token."""
        return b'"choices":[{' in frame

    def tokens(self, frame: bytes, before: int) -> int:
        """The count of the usage chunk; other chunks are not parsed."""
        return int(data(frame)["usage"]["completion_tokens"]) if b'"choices":[]' in frame else before
