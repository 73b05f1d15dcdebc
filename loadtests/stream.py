"""Reads server-sent events and records every sample; Locust's own histograms are too coarse for tokens."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

from locust.contrib.fasthttp import FastHttpUser


@dataclass
class Samples:
    """The samples of one run. Times are in milliseconds."""

    ttft_ms: list[float] = field(default_factory=list)
    inter_token_ms: list[float] = field(default_factory=list)
    end_to_end_ms: list[float] = field(default_factory=list)
    output_tokens: int = 0
    requests: int = 0
    failures: int = 0
    started: float = 0.0
    ended: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second, from the first request's start to the last one's end."""
        return self.output_tokens / max(1e-9, self.ended - self.started)


SAMPLES = Samples()


class StreamUser(FastHttpUser):
    """A user that reads one stream after another."""

    abstract = True
    insecure = True

    def read_stream(self, path: str, body: dict[str, Any], name: str, last: bytes) -> None:
        """POST and read to the end. A stream is complete if a frame contains `last`."""
        start, previous, tokens, complete = time.perf_counter(), None, 0, False
        SAMPLES.started = SAMPLES.started or start
        SAMPLES.requests += 1
        with self.client.post(path, json=body, stream=True, catch_response=True, name=name) as response:
            if response.status_code != 200:
                SAMPLES.failures += 1
                response.failure(f"status {response.status_code}")
                return
            # Whole frames: a read of a fixed size would block until more bytes arrive.
            for frame in iter(lambda: response.stream.readline(b"\n\n"), b""):
                now = time.perf_counter()
                if last in frame:
                    complete = True
                tokens = self.tokens(frame, tokens)
                if not self.carries_text(frame):
                    continue
                if previous is None:
                    SAMPLES.ttft_ms.append((now - start) * 1e3)
                else:
                    SAMPLES.inter_token_ms.append((now - previous) * 1e3)
                previous = now
            if complete:
                response.success()
            else:
                SAMPLES.failures += 1
                response.failure("the stream ended early")
        SAMPLES.ended = time.perf_counter()
        SAMPLES.end_to_end_ms.append((SAMPLES.ended - start) * 1e3)
        SAMPLES.output_tokens += tokens

    def carries_text(self, frame: bytes) -> bool:
        """Whether the frame contains a token."""
        raise NotImplementedError

    def tokens(self, frame: bytes, before: int) -> int:
        """The number of output tokens up to this frame."""
        raise NotImplementedError


def data(frame: bytes) -> Any:
    """The JSON of a `data:` frame."""
    return json.loads(frame.removeprefix(b"data:"))
