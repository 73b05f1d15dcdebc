"""The process that is attached to Ray: `python -m management.launchers.ray.agent`, a child of the reconciler.

It reads `messages` from stdin and writes them to stdout; EOF ends it. Ray ends it when Ray's head has been away for a while; the
reconciler then starts another one, and the workers go on meanwhile. It decides nothing and reads no registry.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import ray
from ray import exceptions
from ray._private.state import state  # Ray has no public name for the machines that leave

from engine.failures import ExitStatus
from management.launchers.ray.messages import Attached, Begin, Ended, FromAgent, Hold, Leaves, Placed, ToAgent
from management.launchers.ray.supervisor import Supervisor

NAMESPACE = "dragoman"
PAUSE_S = 0.1
LOOK_EVERY_S = 1.0
"""How often machines that leave are looked for."""
NO_DEADLINE_S = 3600.0
"""What a machine that leaves at no certain time is taken to have left."""
READ_BYTES = 1 << 16
MOST_OF_REASON = 500
"""Characters of Ray's errors that are passed on."""

commands: msgspec.json.Decoder[ToAgent] = msgspec.json.Decoder(ToAgent)


@dataclass(slots=True)
class Supervised:
    """A worker that waits for a machine, or runs."""

    name: str
    actor: Any
    answer: Any
    """The call that has not ended: `start`, then `wait`."""
    node_id: str = ""
    """In Ray; empty until the worker is placed."""
    leaves_at: int = -1
    """The deadline of its machine that was passed on last, in ms of the epoch."""


class Agent:
    """Carries out what the reconciler says, and tells it what came of it."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: of the file to which messages are written."""
        self._out = descriptor
        self._workers: dict[str, Supervised] = {}
        self._looked = time.monotonic()

    def run(self) -> None:
        """Until EOF."""
        self._say(Attached())
        unread = b""
        while True:
            if select.select([0], [], [], PAUSE_S)[0]:
                data = os.read(0, READ_BYTES)
                if not data:
                    return
                *lines, unread = (unread + data).split(b"\n")
                for line in lines:
                    self._obey(commands.decode(line))
            answers = {worker.answer: worker for worker in self._workers.values()}
            if answers:
                for answer in ray.wait(list(answers), num_returns=len(answers), timeout=0)[0]:
                    self._hear(answers[answer])
            if time.monotonic() - self._looked > LOOK_EVERY_S:
                self._looked = time.monotonic()
                self._look(state.get_draining_nodes())

    def _obey(self, command: ToAgent) -> None:
        if isinstance(command, Begin):
            try:
                self._begin(command)
            except ValueError as error:  # Ray refuses the name or the labels
                self._say(Ended(command.name, ExitStatus.FAULT, str(error)[:MOST_OF_REASON]))
        elif isinstance(command, Hold):
            self._hold(command.name)
        elif (worker := self._workers.pop(command.name, None)) is not None:
            ray.kill(worker.actor)

    def _begin(self, begin: Begin) -> None:
        first, *others = begin.place.choices
        options = {
            "name": begin.name,
            "lifetime": "detached",
            "num_cpus": max(1, begin.config.threads),
            "num_gpus": begin.place.gpus,
            "max_restarts": 0,  # the next worker needs the next epoch, which Ray does not know
            "max_task_retries": 0,
            "label_selector": first or None,
            "fallback_strategy": [{"label_selector": each} for each in others] or None,
        }
        actor = ray.remote(Supervisor).options(**options).remote()
        ports = (begin.first_port, begin.last_port)
        answer = actor.start.remote(msgspec.json.encode(begin.config), ports, begin.secrets)
        self._workers[begin.name] = Supervised(begin.name, actor, answer)

    def _hold(self, name: str) -> None:
        try:
            actor = ray.get_actor(name, NAMESPACE)
        except ValueError:  # it is gone; the worker's own connection tells the rest
            return
        node_id = state.actor_table(actor._actor_id.hex())["Address"]["NodeID"]
        self._workers[name] = Supervised(name, actor, actor.wait.remote(), node_id)

    def _hear(self, worker: Supervised) -> None:
        """Take the answer of a call that has ended."""
        try:
            answer = ray.get(worker.answer)
        except exceptions.ActorUnavailableError:  # it may be there; the call was lost
            if worker.node_id:
                worker.answer = worker.actor.wait.remote()
            else:
                self._end(worker, ExitStatus.FAULT, "the machine was out of reach while the worker was started")
        except exceptions.RayTaskError as error:
            self._end(worker, ExitStatus.FAULT, str(error.cause))
        except exceptions.RayError as error:
            self._end(worker, -signal.SIGKILL, _last_line(error))
        else:
            if worker.node_id:
                self._end(worker, answer, "")
                return
            address, host, worker.node_id, labels = answer
            worker.answer = worker.actor.wait.remote()
            self._say(Placed(worker.name, address, host, labels))

    def _end(self, worker: Supervised, code: int, reason: str) -> None:
        del self._workers[worker.name]
        ray.kill(worker.actor)
        self._say(Ended(worker.name, code, reason[:MOST_OF_REASON]))

    def _look(self, leaving: dict[str, int]) -> None:
        """Pass on which workers' machines will be taken away. `leaving`: deadlines in ms of the epoch, by the machine's id."""
        for worker in self._workers.values():
            deadline = leaving.get(worker.node_id, -1)
            if deadline > worker.leaves_at:
                worker.leaves_at = deadline
                left_s = max(0.0, deadline / 1000 - time.time()) if deadline else NO_DEADLINE_S
                self._say(Leaves(worker.name, left_s))

    def _say(self, message: FromAgent) -> None:
        os.write(self._out, msgspec.json.encode(message) + b"\n")


def _last_line(error: Exception) -> str:
    """Ray's errors are many lines with ids; the last one says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"Ray: {lines[-1]}" if lines else type(error).__name__


def main() -> None:
    """Attach, and serve until EOF. RAY_ADDRESS says where; Ray reads its token and TLS from its own variables."""
    out = os.dup(1)
    os.dup2(2, 1)  # what Ray prints is no message
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the reconciler
    try:
        ray.init(address=os.environ["RAY_ADDRESS"], namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError, exceptions.RayError) as error:  # no head there, or another token
        sys.exit(f"no connection to Ray: {error}")
    Agent(out).run()


if __name__ == "__main__":
    main()
