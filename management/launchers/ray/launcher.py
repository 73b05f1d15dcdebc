"""The reconciler's part of the launcher `ray`. It imports no Ray: a process of its own is attached to it (`agent`), and is started anew
when it ends, as it does while Ray's head is away.

No worker depends on the agent. Leases, drains and ends go over the workers' control connections, and a worker that an earlier
reconciler left is taken over by its address, without Ray.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from engine.address import parse
from engine.failures import ExitStatus
from management.launchers.base import LauncherError, WorkerStatus, name_of
from management.launchers.local import ROOT
from management.launchers.place import ANYWHERE, Place
from management.launchers.ray.messages import Attached, Begin, End, FromAgent, Hold, Leaves, Placed, ToAgent
from management.launchers.remote import RemoteWorker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.config import EngineConfig
    from management.launchers.base import WorkerHandle
    from management.launchers.network import Network

logger = logging.getLogger(__name__)

LAST_WORDS_S = 2.0
"""How long the last status lines of a worker that has ended may take to arrive."""
PAUSE_S = 2.0
"""Before an agent that has ended is started again."""
EXIT_PATIENCE_S = 5.0
COMMAND = (sys.executable, "-m", "management.launchers.ray.agent")

messages: msgspec.json.Decoder[FromAgent] = msgspec.json.Decoder(FromAgent)


class RayWorker:
    """A worker that waits for a machine, and then one with a lease at a TCP address."""

    process_id: int | None = None

    def __init__(self, name: str, launcher: RayLauncher, remote: RemoteWorker | None = None) -> None:
        """`remote`: of a worker that is taken over."""
        self._name, self._launcher, self._remote = name, launcher, remote
        self._unread = [] if remote else [WorkerStatus("loading", doing="waiting for a machine")]
        self._code: int | None = None
        self._ended_at = 0.0
        self._epoch = 0

    def placed(self, told: Placed) -> None:
        """It has a machine."""
        self._remote = RemoteWorker(parse(told.address), self._launcher.credentials, starts=True)
        self._remote.renew(self._epoch)
        self._unread.append(
            WorkerStatus("loading", doing="starting", address=told.address, node=told.node, labels=told.labels)
        )

    def ended(self, code: int, reason: str) -> None:
        """It has ended, or is given up."""
        if self._code is None:
            self._code, self._ended_at = code, time.monotonic()
            if reason:
                self._unread.append(WorkerStatus("failed", reason))

    def leaves(self, in_s: float) -> None:
        """Its machine will be taken away."""
        self._unread.append(WorkerStatus("alive", leaves_in_s=in_s))

    @property
    def waits(self) -> bool:
        """Whether it has no machine yet."""
        return self._remote is None and self._code is None

    def statuses(self) -> list[WorkerStatus]:
        """What the agent said, then what the worker says."""
        self._launcher.hear()
        found, self._unread = self._unread, []
        return found if self._remote is None else found + self._remote.statuses()

    def exit_code(self) -> int | None:
        """What the agent said; without an agent, what the worker's connection tells."""
        self._launcher.hear()
        if self._code is not None:
            late = time.monotonic() - self._ended_at > LAST_WORDS_S
            return self._code if late or self._remote is None or not self._remote.connected else None
        return None if self._remote is None else self._remote.exit_code()

    def renew(self, epoch: int) -> None:
        """Send a renewal, if it has a machine."""
        self._epoch = epoch
        if self._remote is not None:
            self._remote.renew(epoch)

    def drain(self) -> None:
        """Ask for it with the next renewal. One without a machine has nothing to finish."""
        if self._remote is None:
            self._launcher.end(self._name)
            self.ended(ExitStatus.STOPPED, "")
        else:
            self._remote.drain()

    def hand_over(self) -> None:
        """Ask for it with the next renewal."""
        if self._remote is not None:
            self._remote.hand_over()

    def kill(self) -> None:
        """Tell the worker, and Ray to kill its supervisor; take it for ended."""
        self._launcher.end(self._name)
        if self._remote is not None:
            self._remote.kill()
        self._code, self._ended_at = -signal.SIGKILL, 0.0

    def release(self) -> None:
        """Disconnect; a running worker is left to its lease. One without a machine has none, and is not started."""
        if self.waits:
            self._launcher.end(self._name)
        if self._remote is not None:
            self._remote.release()
        self._launcher.forget(self._name)


class RayLauncher:
    """Launches workers through its agent, and takes over those of another reconciler by their addresses."""

    starts_here = False

    def __init__(self, network: Network) -> None:
        """Start the agent. Raises LauncherError if Ray is not installed, or would talk to anybody."""
        if importlib.util.find_spec("ray") is None:
            raise LauncherError("LAUNCHER=ray needs Ray: install dragoman[ray]")
        if os.environ.get("RAY_AUTH_MODE") != "token":
            raise LauncherError(
                "LAUNCHER=ray needs RAY_AUTH_MODE=token and the cluster's token in RAY_AUTH_TOKEN_PATH, here and wherever "
                "`ray start` runs: who reaches a Ray without a token runs what they like on every machine of it"
            )
        if not os.environ.get("RAY_ADDRESS"):
            raise LauncherError("LAUNCHER=ray needs RAY_ADDRESS, host:port of Ray's head")
        if network.credentials is None:
            raise LauncherError(
                "LAUNCHER=ray needs CLUSTER_AUTHORITY, CLUSTER_CERTIFICATE and CLUSTER_KEY: workers on other machines speak TLS "
                "alone; `cluster-certificates` makes these files"
            )
        self._network, self.credentials = network, network.credentials
        self._workers: dict[str, RayWorker] = {}
        self._agent: subprocess.Popen[bytes] | None = None
        self._attached, self._unread, self._started_at = False, b"", 0.0
        self._start_agent()

    def launch(
        self, config: EngineConfig, secrets: Mapping[str, str] | None = None, place: Place = ANYWHERE
    ) -> WorkerHandle:
        """Ask the agent for a machine and a worker. Raises OSError while Ray is away, or if no machine is allowed."""
        if not place.choices:
            raise OSError(
                "no kind of machine is allowed: see the deployment's placement, its price limit and the price table"
            )
        self.hear()
        if not self._attached:
            raise OSError(f"Ray's head at {os.environ['RAY_ADDRESS']} is not reached yet")
        name = name_of(config.worker_id, config.epoch)
        ports = self._network.ports
        wanted = msgspec.structs.replace(config, tls=self.credentials)
        self._send(Begin(name, wanted, place, ports[0], ports[-1], dict(secrets or {})))
        self._workers[name] = RayWorker(name, self)
        return self._workers[name]

    def adopt(self, address: str, name: str) -> WorkerHandle | None:
        """Connect to the worker's control channel; Ray need not be there. One that has no machine yet is not started."""
        if not address:
            return None
        try:
            worker = RayWorker(name, self, RemoteWorker(parse(address), self.credentials))
        except OSError:
            return None
        self._workers[name] = worker
        if self._attached:
            self._send(Hold(name))
        return worker

    def address(self, name: str) -> str:
        """Empty: Ray chooses the machine."""
        return ""

    def threads(self, workers: int) -> int:
        """One: Ray reserves as many CPUs as the option says, and who wants more says so."""
        return 1

    def close(self) -> None:
        """End the agent; the workers run on until their leases end, or another launcher takes them over."""
        agent, self._agent, self._started_at = self._agent, None, math.inf  # and start no other
        if agent is None or agent.stdin is None or agent.stdout is None:
            return
        with suppress(OSError):
            agent.stdin.close()
        try:
            agent.wait(EXIT_PATIENCE_S)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()
        agent.stdout.close()

    def hear(self) -> None:
        """Take what the agent has said; start another one if it has ended."""
        agent = self._agent
        if agent is None or agent.stdout is None:
            if time.monotonic() - self._started_at > PAUSE_S:
                self._start_agent()
            return
        ended = agent.poll() is not None  # before its last words are read
        *lines, self._unread = (self._unread + (agent.stdout.read() or b"")).split(b"\n")
        for line in lines:
            self._take(messages.decode(line))
        if ended:
            self._lose_agent(agent)

    def end(self, name: str) -> None:
        """Tell the agent to kill a worker's supervisor."""
        self._send(End(name))

    def forget(self, name: str) -> None:
        """Nobody asks for this worker any more."""
        self._workers.pop(name, None)

    def _take(self, message: FromAgent) -> None:
        if isinstance(message, Attached):
            self._attached = True
            logger.info("attached to Ray at %s", os.environ["RAY_ADDRESS"])
            for name in self._workers:  # of an earlier agent or reconciler
                self._send(Hold(name))
            return
        worker = self._workers.get(message.name)
        if worker is None:
            return
        if isinstance(message, Placed):
            worker.placed(message)
        elif isinstance(message, Leaves):
            worker.leaves(message.in_s)
        else:
            worker.ended(message.code, message.reason)

    def _start_agent(self) -> None:
        self._started_at = time.monotonic()
        self._agent = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        if self._agent.stdin is None or self._agent.stdout is None:
            raise RuntimeError("the agent's pipes were not made")
        os.set_blocking(self._agent.stdin.fileno(), False)
        os.set_blocking(self._agent.stdout.fileno(), False)

    def _lose_agent(self, agent: subprocess.Popen[bytes]) -> None:
        """Workers that run go on. Those that waited for a machine are given up, for nobody will hear of their start."""
        logger.warning("not attached to Ray any more (exit status %s); workers go on", agent.poll())
        for stream in (agent.stdin, agent.stdout):
            if stream is not None:
                stream.close()
        self._agent, self._attached, self._unread, self._started_at = None, False, b"", time.monotonic()
        for worker in self._workers.values():
            if worker.waits:
                worker.ended(ExitStatus.FAULT, "Ray's head was lost while the worker waited for a machine")

    def _send(self, command: ToAgent) -> None:
        """One line; an agent that does not read is ended, and another one takes its place."""
        agent = self._agent
        if agent is None or agent.stdin is None:
            return
        try:
            agent.stdin.write(msgspec.json.encode(command) + b"\n")
            agent.stdin.flush()
        except OSError:
            agent.kill()
