"""Lines between the reconciler and its agent, which is attached to Ray. JSON, one message a line; secrets go this way and are never logged."""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig
from management.launchers.place import Place


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Place and start a worker. `config` has no address yet."""

    name: str
    config: EngineConfig
    place: Place
    first_port: int
    last_port: int
    secrets: dict[str, str] = {}


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """Watch the supervisor of a worker that another agent has started."""

    name: str


class End(msgspec.Struct, frozen=True, tag="end"):
    """Kill a worker's supervisor, and the worker with it."""

    name: str


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """The agent reaches Ray's head."""


class Placed(msgspec.Struct, frozen=True, tag="placed"):
    """A worker was started on a machine with these labels, and will listen at the address."""

    name: str
    address: str
    node: str
    labels: dict[str, str]


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A worker has ended, or its machine is lost. `code`: as subprocess.Popen.returncode."""

    name: str
    code: int
    reason: str = ""


class Leaves(msgspec.Struct, frozen=True, tag="leaves"):
    """A worker's machine will be taken away in so many seconds."""

    name: str
    in_s: float


ToAgent = Begin | Hold | End
FromAgent = Attached | Placed | Ended | Leaves
