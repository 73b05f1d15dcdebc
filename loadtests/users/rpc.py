"""Users of gRPC. Their messages are in loadtests/protocol/, so that nothing of the server is needed, also not its reflection."""

from __future__ import annotations

import tempfile
import time
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import grpc
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc.experimental import gevent as grpc_gevent
from grpc_tools import protoc

from loadtests.current import Order
from loadtests.settings import API_KEY, REQUEST_TIMEOUT_S
from loadtests.users.base import Answer, DialectUser, Question

FULL = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
WHEN = ("retry-after", "retry-after-ms", "grpc-retry-pushback-ms")
PROTOCOL = Path(__file__).resolve().parent.parent / "protocol"


@dataclass(frozen=True)
class Method:
    """A call that answers with a stream. `file` of PROTOCOL defines its messages, whose names are without their package.
    `asks_once`: it takes one message and not a stream of them.
    """

    file: str
    service: str
    name: str
    request: str
    response: str
    asks_once: bool = False


class Messages:
    """The messages of a file, in a pool of their own: others may define the same names."""

    def __init__(self, file: str) -> None:
        with tempfile.NamedTemporaryFile() as compiled:
            if protoc.main(["protoc", f"-I{PROTOCOL}", f"--descriptor_set_out={compiled.name}", file]):
                raise RuntimeError(f"{file} cannot be compiled")
            (described,) = FileDescriptorSet.FromString(Path(compiled.name).read_bytes()).file
        self._package, self._pool = described.package, DescriptorPool()
        self._pool.Add(described)

    def message(self, name: str) -> Any:
        """The class of a message."""
        return GetMessageClass(self._pool.FindMessageTypeByName(f"{self._package}.{name}"))


class _Calls:
    """Channels and calls of this process: users share them, as a client's threads do."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._channels: dict[str, Any] = {}
        self._made: dict[tuple[str, Method], tuple[Any, Any]] = {}

    def find(self, address: str, method: Method) -> tuple[Any, Any]:
        """The class of requests, and the call."""
        with self._lock:
            if not self._channels:
                grpc_gevent.init_gevent()  # not before the first use, because Locust may fork its workers until then
            if address not in self._channels:
                self._channels[address] = grpc.insecure_channel(address)
            if (address, method) not in self._made:
                self._made[address, method] = _made(self._channels[address], method)
            return self._made[address, method]


def _made(channel: Any, method: Method) -> tuple[Any, Any]:
    messages = Messages(method.file)
    request, response = messages.message(method.request), messages.message(method.response)
    kind = channel.unary_stream if method.asks_once else channel.stream_stream
    return request, kind(f"/{method.service}/{method.name}", request.SerializeToString, response.FromString)


CALLS = _Calls()


class RpcUser(DialectUser):
    """Calls a method. A subclass makes its request and reads its messages."""

    abstract = True
    good_status = "OK"
    method: Method

    @abstractmethod
    def address(self, order: Order) -> str:
        """Host and port."""

    @abstractmethod
    def request(self, question: Question, message: Any) -> Any:
        """The request, of this class of messages."""

    @abstractmethod
    def read(self, message: Any, answer: Answer) -> None:
        """Fill in the answer from one message."""

    def finished(self, answer: Answer) -> None:
        """The call has ended with OK."""

    def call(self, order: Order, question: Question, answer: Answer) -> None:
        metadata = [("authorization", f"Bearer {API_KEY}")] if API_KEY else []
        begin, reason = time.time(), ""
        try:
            message, call = CALLS.find(self.address(order), self.method)
            request = self.request(question, message)
            answer.begin = time.perf_counter()  # compiling the messages is not the server's time
            sent = request if self.method.asks_once else iter([request])
            for received in call(sent, timeout=REQUEST_TIMEOUT_S, metadata=metadata):
                self.read(received, answer)
            answer.status = self.good_status
            self.finished(answer)
        except grpc.RpcError as error:
            answer.status, answer.detail = error.code().name, (error.details() or "")[:200]
            answer.refused = error.code() in FULL and not answer.times
            answer.told_when = any(key in WHEN for key, _ in error.trailing_metadata() or ())
        sample = answer.sample(type(self).__name__, question, self.good_status)
        if not (answer.refused and order.stage.may_refuse):
            reason = sample.reason
        self.environment.events.request.fire(
            request_type="gRPC",
            name=type(self).__name__,
            response_time=sample.total_ms,
            response_length=answer.tokens,
            exception=RuntimeError(reason) if reason else None,
            start_time=begin,
            context={},
        )
