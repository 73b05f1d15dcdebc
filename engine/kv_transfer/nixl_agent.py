"""A NIXL agent of this process: memory that it has registered, and reads from that of another worker. It knows no blocks.

No thread of NIXL's runs: whoever waits for a read calls `progress` or `read`, which move bytes of all transfers. A read that does not
end may still write into its memory later, so the whole agent is given up with it, and the next transfer gets another one.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import select
import threading
import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.kv_transfer import wire

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from engine.kv_transfer.blocks import Bytes

logger = logging.getLogger(__name__)

ENVIRONMENT = {
    "NIXL_LOG_LEVEL": "FATAL",  # what fails is raised
    "UCX_LOG_FILE": "stderr",  # a worker's stdout is for its launcher
    "UCX_LOG_LEVEL": "error",
    "UCX_HANDLE_ERRORS": "none",  # signals are the worker's own
    "UCX_MEM_MMAP_HOOK_MODE": "none",  # what is registered stays where it is
    "UCX_MEM_CUDA_HOOK_MODE": "none",
}
"""Of the libraries, unless the environment says otherwise."""
ONE_HOST = "posix,cma,self"
"""Shared memory and copies between processes, which the kernel allows to this user alone; UCX's sysv is open to its group."""
NETWORK = os.environ.get("UCX_TLS", "all")
"""Where devices are named an operator may choose."""
MEMORY = "DRAM"
BACKEND = "UCX"
PROGRESS = "PROC"
FINISHED = "DONE"


class AgentError(Exception):
    """NIXL is not installed, or refuses; the text says what."""


class Slab:
    """Memory that an agent has registered."""

    def __init__(self, data: Bytes, description: bytes) -> None:
        self.data = data
        self.description = description
        """What another agent needs to read it."""

    @property
    def address(self) -> int:
        """Of its first byte, in this process."""
        return int(self.data.ctypes.data)


class Agent:
    """An agent and its slabs, used by many threads."""

    def __init__(self, devices: str) -> None:
        """`devices`: the network devices that it may use, separated by commas; empty: none, but shared memory. Raises AgentError."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        # Set also if the environment has them: it might open more. NIXL passes lists on in no other way.
        os.environ["UCX_TLS"] = NETWORK if devices else ONE_HOST
        os.environ["UCX_NET_DEVICES"] = devices or "all"
        try:
            library = importlib.import_module("nixl")
        except ImportError as error:
            raise AgentError(f"{error}; install dragoman[nixl]") from error
        log = logging.getLogger("nixl")  # its own handler writes to stdout
        log.handlers.clear()
        log.propagate = True
        log.setLevel(logging.WARNING)
        known = vars(library._bindings).values()
        self.errors = tuple(each for each in known if isinstance(each, type) and issubclass(each, Exception))
        strict = library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = library.nixl_agent_config(enable_prog_thread=False, backends=[], sync_mode=strict)
        # A name that was never used before: another worker may remember what an earlier process of this one registered.
        self._agent: Any = library.nixl_agent(secrets.token_hex(8), config)
        try:
            # Shared memory does not tell UCX of a peer's end; the connection between the workers does.
            self._agent.create_backend(BACKEND, {"ucx_error_handling_mode": "peer" if devices else "none"})
        except self.errors as error:
            raise AgentError(f"NIXL cannot use {devices or 'shared memory'}: {error}") from error
        self._lock = threading.Lock()
        """Guards what follows."""
        self._free: list[Slab] = []
        self._peers: Counter[str] = Counter()
        self.broken = False
        """Whether a read may still write into a slab."""

    def __del__(self) -> None:
        self._agent = None  # before its slabs, into which a read may still write

    @contextmanager
    def slab(self, count: int) -> Iterator[Slab]:
        """Registered memory of at least `count` bytes, which is used again. Raises OSError."""
        with self._lock:
            fitting = [] if self.broken else [slab for slab in self._free if len(slab.data) >= count]
            slab = fitting[0] if fitting else self._registered(count)
            if fitting:
                self._free.remove(slab)
        try:
            yield slab
        finally:
            with self._lock:
                self._free.append(slab)

    @contextmanager
    def peer(self, description: bytes) -> Iterator[str]:
        """The name of the agent that made the description of a slab. Raises OSError."""
        with self._lock:
            try:
                name = self._agent.add_remote_agent(description).decode()
            except self.errors as error:
                raise ConnectionError(f"NIXL: {error}") from error
            self._peers[name] += 1
        try:
            yield name
        finally:
            with self._lock:
                self._peers[name] -= 1
                if not self._peers[name]:
                    del self._peers[name]
                    self._forget(name)

    def read(self, connection: socket.socket, peer: str, address: int, into: Slab, count: int) -> None:
        """Copy `count` bytes at a peer's `address` to the begin of a slab. Raises TimeoutError, and OSError if the peer is gone, which
        the end of its `connection` tells.
        """
        hung_up = select.poll()
        hung_up.register(connection, select.POLLRDHUP)
        deadline = time.monotonic() + wire.STALL_S
        try:
            places = [self._agent.get_xfer_descs([(each, count, 0)], MEMORY) for each in (into.address, address)]
            handle = self._agent.initialize_xfer("READ", *places, peer)
        except self.errors as error:  # nothing has begun
            raise ConnectionError(f"NIXL: {error}") from error
        ended = False
        try:
            state = self._agent.transfer(handle)
            while state == PROGRESS:
                time.sleep(wire.TICK_S)
                state = self._agent.check_xfer_state(handle)
                if state == PROGRESS and hung_up.poll(0):
                    raise ConnectionResetError("the peer hung up in the middle")
                if state == PROGRESS and time.monotonic() > deadline:
                    raise TimeoutError
            ended = state == FINISHED
        except self.errors as error:
            raise ConnectionError(f"NIXL: {error}") from error
        finally:
            if not ended:
                self.broken = True
            try:
                handle.release()
            except self.errors:
                self.broken = True
            del handle  # it would keep NIXL's agent, which must end before its slabs do
        if not ended:
            raise ConnectionError(f"NIXL: a read ended as {state}")

    def progress(self) -> None:
        """Answer the reads of others for a moment. Raises OSError."""
        try:
            self._agent.get_new_notifs()
        except self.errors as error:
            raise ConnectionError(f"NIXL: {error}") from error

    def _registered(self, count: int) -> Slab:
        data = np.empty(count, np.uint8)
        try:
            made = self._agent.register_memory([(int(data.ctypes.data), count, 0, "")], MEMORY)
            return Slab(data, self._agent.get_partial_agent_metadata(made, inc_conn_info=True, backends=[BACKEND]))
        except self.errors as error:
            raise ConnectionError(f"NIXL: {error}") from error

    def _forget(self, peer: str) -> None:
        try:
            self._agent.remove_remote_agent(peer)
        except self.errors as error:  # it is gone already
            logger.debug("NIXL: %s", error)
