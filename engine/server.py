"""The worker's socket and main loop. One thread reads clients, runs steps and writes outputs; it never blocks on a
client.

Without requests the loop sleeps in `select`. A client that does not read its outputs for `client_timeout_s` is dropped
with its requests. Heartbeats are sent by this loop, and during a step by the thread that reports progress, so that
clients hear from a worker in a long step too. Whether the worker makes progress is judged by its launcher.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine import address, faults, messages
from engine.address import Channel
from engine.engine import MAX_FAILED_STEPS, EngineBroken, refused
from engine.failures import Failure, FailureCode
from engine.kv_transfer.messages import Fetch, Pull, Release
from engine.messages import (
    MALFORMED,
    MAX_FRAME_BYTES,
    MAX_GREETING_BYTES,
    PROTOCOL_VERSION,
    Abort,
    AdapterCommand,
    Dead,
    Embed,
    FrameBuffer,
    Heartbeat,
    Hello,
    Outputs,
    ProtocolError,
    Ready,
    Refused,
    Reply,
    Submit,
    ToClient,
    frame,
    version_of,
)
from engine.process.progress import progress

if TYPE_CHECKING:
    from engine.address import Endpoint
    from engine.config import EngineConfig
    from engine.engine import Engine

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
CLIENT_SILENT_BEATS = 10
"""A client on another host that sends nothing for this many of our heartbeats has vanished: it sends one of its own each second,
and a lost segment of TCP is sent again within that time. Time that a step takes does not count.
"""
MAX_UNSENT_BYTES = MAX_FRAME_BYTES
"""What waits for a client that reads, but slower than its outputs come; more ends its connection."""
READ_BYTES = 1 << 18
MAX_ACCEPTED = 64
"""Connections that are accepted between two steps."""
DEAF_S = 1.0
"""Seconds until connections are accepted again after no descriptor was left for one."""
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
BLOCKED_S = 0.005
"""Seconds to sleep when every request waits for an adapter or a grammar."""


@dataclass(slots=True, eq=False)
class Connection:
    """One client: its socket, the incomplete frame received from it, and the bytes not yet sent to it."""

    client: int
    socket: socket.socket
    received: FrameBuffer = field(default_factory=lambda: FrameBuffer(MAX_GREETING_BYTES))
    unsent: bytearray = field(default_factory=bytearray)
    stalled_since: float | None = None
    greeted: bool = False
    silent_beats: int = 0


class EngineServer:
    """Serves one engine core at its address until it is drained, stopped or broken."""

    def __init__(self, core: Engine, config: EngineConfig, endpoint: Endpoint | None = None) -> None:
        """`endpoint`: of the configured address, if it is open already. Raises OSError, AddressError or CredentialsError."""
        self.core, self.config = core, config
        self.connections: dict[int, Connection] = {}
        self.selector = selectors.DefaultSelector()
        self.draining = self.handing_over = self.stopping = False
        self._loads: list[tuple[Connection, AdapterCommand]] = []
        """Adapter loads in progress, with the connection to answer."""
        self._next_client = 1
        self._last_heartbeat = 0.0
        self._at_clients = threading.Lock()
        """Guards the connections: held by the loop except during a step, when the reporter thread may send
        heartbeats.
        """
        self._endpoint = endpoint or address.parse(config.address).endpoint(config.tls)
        self.listener = self._endpoint.listen(Channel.REQUESTS)
        self._deaf_until = 0.0
        """When connections are accepted again; 0: they are."""
        self.selector.register(self.listener, selectors.EVENT_READ, None)

    def watch(self, file: Any) -> None:
        """Stop when `file` reaches EOF, which means that the parent process has ended."""
        self.selector.register(file, selectors.EVENT_READ, "lifeline")

    def run(self) -> None:
        """Serve until the end, then close; raises EngineBroken after sending the reason to the clients."""
        with self._at_clients:
            try:
                while not self.stopping and not (self.draining and self._is_drained):
                    progress.begin("waiting for requests")
                    self._exchange()
                    if self.handing_over and self.core.has_work:
                        logger.info("handing over the unfinished requests")
                        self.core.hand_over()
                    if self.core.has_work:
                        self._step()
                    if self._loads:
                        self._answer_loads()
                    self._heartbeat()
            except EngineBroken as error:
                self._broadcast(Dead(str(error)))
                raise
            finally:
                self._close()

    def terminate(self) -> None:
        """Drain: take no new requests and end when the running ones have. Called again: hand the running ones over, so
        that other workers continue them. Only sets flags, so a signal handler may call it.
        """
        self.handing_over, self.draining = self.draining, True

    def beat(self) -> None:
        """Send a heartbeat to all clients if a step is being computed. Called by the reporter thread. Slow and vanished
        clients are left to the loop.
        """
        if not self._at_clients.acquire(blocking=False):
            return
        try:
            heartbeat = frame(Heartbeat(self.core.stats, self.draining, self.core.histograms))
            for connection in self.connections.values():
                if connection.greeted and not connection.unsent:
                    connection.unsent += heartbeat  # first: what TLS has not taken must be the next that it gets
                    with suppress(OSError):
                        sent = connection.socket.send(connection.unsent)
                        del connection.unsent[:sent]
        finally:
            self._at_clients.release()

    def _step(self) -> None:
        self._at_clients.release()
        try:
            outputs = self.core.step()
        finally:
            self._at_clients.acquire()
        stats = self.core.refresh_stats()
        histograms = None if self.core.has_work else self.core.histograms
        for client, items in outputs.items():
            if client in self.connections:
                self._send(self.connections[client], Outputs(items, stats, histograms))
        if self.core.failed_steps >= MAX_FAILED_STEPS:
            raise EngineBroken(f"{self.core.failed_steps} steps failed in a row")
        if not self.core.has_work:
            self.core.check_integrity()

    def _exchange(self) -> None:
        """Do all I/O that is ready. Without work, sleep until I/O is ready or the next heartbeat is due."""
        if self.core.has_work:
            timeout = BLOCKED_S if self.core.blocked else 0.0
        elif self._loads:
            timeout = BLOCKED_S
        else:
            timeout = max(0.0, self._last_heartbeat + HEARTBEAT_S - time.monotonic())
        # All who knock, and what they have said already: else each of them would wait for a step, or two.
        for _ in range(MAX_ACCEPTED):
            if not self._heed(timeout):
                break
            timeout = 0.0

    def _heed(self, timeout: float) -> bool:
        """Do the I/O that is ready within `timeout` seconds; whether a connection was accepted."""
        accepted = False
        if self._deaf_until and time.monotonic() >= self._deaf_until:
            self._deaf_until = 0.0
            self.selector.register(self.listener, selectors.EVENT_READ, None)
        for key, events in self.selector.select(timeout):
            if key.data == "lifeline":
                if not os.read(key.fd, 4096):
                    self.stopping = True
            elif key.data is None:
                self._accept()
                accepted = True
            else:
                if events & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if events & selectors.EVENT_READ and key.data.client in self.connections:
                    self._receive(key.data)
        return accepted

    def _accept(self) -> None:
        try:
            client_socket, _ = self.listener.accept()
        except OSError as error:  # the client has gone, or no descriptor is left: what is open is served
            if error.errno in NO_DESCRIPTORS:
                logger.warning("connection not accepted: %s", error.strerror)
                self.selector.unregister(self.listener)
                self._deaf_until = time.monotonic() + DEAF_S
            return
        client_socket.setblocking(False)
        connection = Connection(self._next_client, client_socket)
        self._next_client += 1
        self.connections[connection.client] = connection
        self.selector.register(client_socket, selectors.EVENT_READ, connection)

    def _receive(self, connection: Connection) -> None:
        try:
            data = connection.socket.recv(READ_BYTES)
            bodies = connection.received.feed(data)
        except BlockingIOError:
            return
        except (OSError, *MALFORMED) as error:
            return self._drop(connection, f"{type(error).__name__}: {error}")
        if not data:
            return self._drop(connection, None)
        connection.silent_beats = 0
        for body in bodies:
            if connection.client not in self.connections:  # dropped while an earlier frame was handled
                break
            try:
                if not connection.greeted and (version := version_of(body)) != PROTOCOL_VERSION:
                    return self._refuse(connection, f"it speaks version {version} of the protocol")
                message = messages.to_worker.decode(body)
            except MALFORMED as error:
                return self._drop(connection, f"{type(error).__name__}: {error}")
            self._handle(connection, message)

    def _handle(self, connection: Connection, message: messages.ToWorker) -> None:
        if isinstance(message, Hello):
            self._greet(connection, message)
        elif isinstance(message, Pull) and not connection.greeted:
            self._pass_on(connection, message)
        elif not connection.greeted:
            self._drop(connection, "the first frame must be Hello")
        elif isinstance(message, Submit | Embed):
            ended = (
                refused(message, Failure(FailureCode.DRAINING))
                if self.draining
                else self.core.submit(connection.client, message)
            )
            if ended is not None:
                self._send(connection, Outputs([ended], self.core.refresh_stats()))
        elif isinstance(message, AdapterCommand):
            refusal = self.core.command(message)
            if message.action == "load" and refusal is None:
                self._loads.append((connection, message))
            else:
                self._send(connection, Reply(message.call_id, refusal))
        elif isinstance(message, Abort):
            self.core.abort(connection.client, message.request_ids)
        elif isinstance(message, Fetch) and self.core.transfers is not None:
            self.core.transfers.fetch(message)
        elif isinstance(message, Release) and self.core.transfers is not None:
            self.core.transfers.release(message.transfer_ids)

    def _answer_loads(self) -> None:
        """Answer the load commands whose adapter has been read or has failed."""
        for load in list(self._loads):
            connection, message = load
            if self.core.loading(message.adapter.digest):
                continue
            self._loads.remove(load)
            if connection.client in self.connections:
                self._send(connection, Reply(message.call_id, self.core.load_failure(message.adapter.digest)))

    def _pass_on(self, connection: Connection, pull: Pull) -> None:
        """Give another worker's connection to the thread that sends it blocks."""
        mine = (PROTOCOL_VERSION, self.config.worker_id, self.config.epoch)
        if (pull.protocol, pull.worker_id, pull.epoch) != mine or self.core.transfers is None:
            return self._drop(connection, "another worker or epoch was expected")
        del self.connections[connection.client]
        self.selector.unregister(connection.socket)
        self.core.transfers.serve(connection.socket, pull)

    def _greet(self, connection: Connection, hello: Hello) -> None:
        if (hello.worker_id, hello.epoch) != (self.config.worker_id, self.config.epoch):
            return self._refuse(connection, "another worker or epoch was expected")
        connection.greeted, connection.received.limit = True, MAX_FRAME_BYTES
        self._send(connection, Ready(PROTOCOL_VERSION, self.config.worker_id, self.config.epoch, self.core.info))

    def _refuse(self, connection: Connection, reason: str) -> None:
        self._send(connection, Refused(PROTOCOL_VERSION, self.config.worker_id, self.config.epoch))
        self._drop(connection, reason)

    def _send(self, connection: Connection, message: ToClient) -> None:
        try:
            data = frame(message)
        except ProtocolError as error:  # the message exceeds the largest frame
            return self._drop(connection, str(error))
        if len(connection.unsent) > MAX_UNSENT_BYTES:
            return self._drop(connection, "it reads too slowly")
        if faults.armed:
            return self._send_with_faults(connection, data, type(message).__name__)
        connection.unsent += data
        self._flush(connection)

    def _send_with_faults(self, connection: Connection, data: bytes, kind: str) -> None:
        faults.hit("frame", lambda: [kind])
        sent = faults.cut("frame", data, lambda: [kind])
        connection.unsent += sent
        self._flush(connection)
        if len(sent) < len(data):
            self._drop(connection, "a fault point cut a frame")

    def _flush(self, connection: Connection) -> None:
        """Send as much as the socket accepts; record since when a client accepts nothing."""
        try:
            sent = connection.socket.send(connection.unsent) if connection.unsent else 0
        except BlockingIOError:
            sent = 0
        except OSError as error:
            return self._drop(connection, str(error))
        del connection.unsent[:sent]
        events = selectors.EVENT_READ
        if not connection.unsent:
            connection.stalled_since = None
        else:
            events |= selectors.EVENT_WRITE
            if sent or connection.stalled_since is None:
                connection.stalled_since = time.monotonic()
        self.selector.modify(connection.socket, events, connection)

    def _heartbeat(self) -> None:
        now = time.monotonic()
        if now - self._last_heartbeat < HEARTBEAT_S:
            return
        self._last_heartbeat = now
        self._broadcast(Heartbeat(self.core.refresh_stats(), self.draining, self.core.histograms))
        for connection in list(self.connections.values()):
            if connection.stalled_since is not None and now - connection.stalled_since > self.config.client_timeout_s:
                self._drop(connection, "it stopped reading")
            connection.silent_beats += self._endpoint.remote
            if connection.silent_beats > CLIENT_SILENT_BEATS:
                self._drop(connection, "it has fallen silent")

    def _broadcast(self, message: ToClient) -> None:
        for connection in list(self.connections.values()):
            if connection.greeted:
                self._send(connection, message)

    def _drop(self, connection: Connection, reason: str | None) -> None:
        if self.connections.pop(connection.client, None) is None:
            return
        if reason is not None:
            logger.warning("client dropped: %s", reason)
        self.selector.unregister(connection.socket)
        connection.socket.close()
        self.core.abort_client(connection.client)

    @property
    def _is_drained(self) -> bool:
        """Whether nobody waits for anything; blocks that are held are lost when the worker hands over."""
        held = self.core.transfers is not None and self.core.transfers.holds and not self.handing_over
        unsent = any(connection.unsent for connection in self.connections.values())
        return not (self.core.has_work or unsent or held)

    def _close(self) -> None:
        for connection in list(self.connections.values()):
            self._drop(connection, None)
        self._endpoint.release(Channel.REQUESTS)
        self.listener.close()
        self.core.close()
        self.selector.close()
