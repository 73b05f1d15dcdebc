"""A user of the TGI dialect's streams."""

from __future__ import annotations

from locust import constant, task

from loadtests.prompts import next_prompt
from loadtests.settings import SETTINGS
from loadtests.stream import StreamUser


class TGIStreamUser(StreamUser):
    """Streams from /generate_stream. TGI has no parameter to ignore the end of a text, so lengths vary."""

    wait_time = constant(0)

    @task
    def generate_stream(self) -> None:
        """One stream."""
        body = {"inputs": next_prompt(), "parameters": {"max_new_tokens": SETTINGS.output_tokens, "details": True}}
        self.read_stream("/generate_stream", body, "tgi /generate_stream", b'"finish_reason"')

    def carries_text(self, frame: bytes) -> bool:
        """Every frame except an error has a token."""
        return b'"token":' in frame

    def tokens(self, frame: bytes, before: int) -> int:
        """One token a frame."""
        return before + self.carries_text(frame)
