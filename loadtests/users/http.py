"""Users of HTTP: whole answers, and streams of frames that end with a separator."""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import Any

from locust.contrib.fasthttp import FAILURE_EXCEPTIONS, FastHttpUser

from loadtests.current import CURRENT, Order
from loadtests.settings import API_KEY, REQUEST_TIMEOUT_S
from loadtests.users.base import Answer, DialectUser, Question

FULL = {429, 503}
HEADERS = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {API_KEY}"} if API_KEY else {})}


class HttpUser(DialectUser, FastHttpUser):
    """POSTs a body. A subclass says where to, what, and how to read the answer."""

    abstract = True
    insecure = True
    concurrency = 1024
    connection_timeout = REQUEST_TIMEOUT_S
    network_timeout = REQUEST_TIMEOUT_S
    separator = b""
    """Between a stream's frames; without one the answer is whole."""

    @abstractmethod
    def url(self, order: Order) -> str:
        """Where to."""

    @abstractmethod
    def body(self, question: Question) -> dict[str, Any]:
        """What is sent."""

    @abstractmethod
    def read(self, data: bytes, answer: Answer) -> None:
        """Fill in the answer from the whole of it, or from one frame."""

    def on_stop(self) -> None:
        """Leave no connection open, which the server would count; requests of open loops still need theirs."""
        if not CURRENT.order().stage.times:
            self.client.client.close()

    def call(self, order: Order, question: Question, answer: Answer) -> None:
        url, name = self.url(order), type(self).__name__
        with self.client.post(
            url, json=self.body(question), headers=HEADERS, stream=True, catch_response=True, name=name
        ) as response:
            try:
                self.receive(response, answer)
            except FAILURE_EXCEPTIONS as error:
                answer.lost = f"{type(error).__name__}: {error}"
            except (ValueError, LookupError, TypeError) as error:
                answer.ended, answer.detail = False, f"and cannot be read: {type(error).__name__}: {error}"
            sample = answer.sample(name, question, self.good_status)
            response.request_meta.update(response_time=sample.total_ms, response_length=answer.tokens)
            if not sample.reason or (answer.refused and order.stage.may_refuse):
                response.success()
            else:
                response.failure(sample.reason)

    def receive(self, response: Any, answer: Answer) -> None:
        """Read the status and the answer."""
        if not response.status_code:
            answer.lost = f"{type(response.error).__name__}: {response.error}"
            return
        answer.status = str(response.status_code)
        if response.status_code != 200:
            answer.refused = response.status_code in FULL
            answer.told_when = "retry-after" in response.headers
            answer.detail = response.content[:200].decode(errors="replace")
        elif self.separator:
            # Whole frames: a read of a fixed size would block until more bytes arrive.
            while frame := response.stream.readline(self.separator):
                if not frame.startswith(b":"):  # a comment, which keeps the connection alive
                    self.read(bytes(frame), answer)
        else:
            self.read(response.content, answer)


def data(frame: bytes) -> Any:
    """The JSON of a `data:` frame."""
    return json.loads(frame.removeprefix(b"data:"))
