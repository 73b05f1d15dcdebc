"""Fault points: named places where a test asks for a failure that it cannot bring about from outside.

`DRAGOMAN_FAULTS` lists faults, separated by commas, as `point:mode:argument[:when]`, such as `step:raise::1` or
`frame:cut:9:@Outputs`. A process reads it once, and only with `DRAGOMAN_ENABLE_FAULTS=1`; otherwise `armed` stays empty, which is all
that a point looks at. No server that others can reach starts with them (`config.options`). A point never decides how the
failure is handled.
"""

from __future__ import annotations

import errno
import os
import time
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

VARIABLE, SWITCH = "DRAGOMAN_FAULTS", "DRAGOMAN_ENABLE_FAULTS"
ON = ("1", "true", "yes", "on", "t", "y")


class Mode(StrEnum):
    """What happens at a point, with its argument."""

    RAISE = "raise"
    """An InjectedFault; no argument."""
    ERRNO = "errno"
    """An OSError of this name, such as ENOSPC."""
    SLEEP = "sleep"
    """Seconds in which the thread stands still."""
    EXIT = "exit"
    """The status with which the process ends at once, without any clean-up."""
    CUT = "cut"
    """The bytes of a message that are sent before its connection is closed."""


class Point(msgspec.Struct, frozen=True):
    """What a point can do, where it is, and what `@` may name there."""

    modes: frozenset[Mode]
    about: str


_ANYWHERE = frozenset({Mode.RAISE, Mode.SLEEP, Mode.EXIT})
POINTS = {
    "start": Point(_ANYWHERE, "a worker's start, before its model is loaded"),
    "step": Point(_ANYWHERE, "before a step is computed; @ names a token id of one of its sequences"),
    "frame": Point(_ANYWHERE | {Mode.CUT}, "before a worker sends a message; @ names its type, such as Outputs"),
    "loop": Point(frozenset({Mode.SLEEP, Mode.EXIT}), "once a second on the event loop of a web process"),
    "registry.write": Point(_ANYWHERE, "before a statement that changes the database; @ names one of its words"),
    "offload.write": Point(_ANYWHERE | {Mode.ERRNO}, "before a part of a KV block is written to disk"),
    "offload.read": Point(_ANYWHERE | {Mode.ERRNO}, "before a part of a KV block is read from disk"),
    "adapter.copy": Point(_ANYWHERE | {Mode.ERRNO}, "before a part of an adapter is written into the store"),
}


class FaultError(ValueError):
    """The text names no faults; the message says what is known."""


class InjectedFault(Exception):
    """The failure of the mode `raise`."""


class Fault(msgspec.Struct, frozen=True):
    """One fault. `first` to `last` are the visits to the point, from 1, at which it happens; with `among` only visits that
    concern this value count.
    """

    point: str
    mode: Mode
    argument: str = ""
    first: int = 1
    last: int | None = None
    among: str = ""


class Armed(msgspec.Struct):
    """A fault and how often its point was visited in this process, or concerned its value."""

    fault: Fault
    visits: int = 0

    def due(self, among: Callable[[], Collection[str]] | None) -> bool:
        """Count a visit; whether the fault happens at it."""
        fault = self.fault
        if fault.among and (among is None or fault.among not in among()):
            return False
        self.visits += 1
        return fault.first <= self.visits and (fault.last is None or self.visits <= fault.last)


armed: dict[str, list[Armed]] = {}
"""The faults of this process by point. Whoever passes a point looks here first, which costs nothing while it is empty."""


def parse(text: str) -> list[Fault]:
    """The faults of a text; raises FaultError for an unknown point, mode, argument or time."""
    return [_parsed(part.strip()) for part in text.split(",") if part.strip()]


def arm(environment: Mapping[str, str]) -> None:
    """Take the faults of these variables, in place of earlier ones; raises FaultError."""
    armed.clear()
    if environment.get(SWITCH, "").lower() in ON:
        for fault in parse(environment.get(VARIABLE, "")):
            armed.setdefault(fault.point, []).append(Armed(fault))


def hit(point: str, among: Callable[[], Collection[str]] | None = None) -> None:
    """Pass a point: nothing happens, or a fault. `among` gives the values that the visit concerns."""
    for each in armed.get(point, ()):
        if each.fault.mode is not Mode.CUT and each.due(among):
            _happen(each.fault)


def cut(point: str, data: bytes, among: Callable[[], Collection[str]] | None = None) -> bytes:
    """The part of `data` that is sent: all of it, or less by a fault."""
    for each in armed.get(point, ()):
        if each.fault.mode is Mode.CUT and each.due(among):
            return data[: int(each.fault.argument)]
    return data


def _happen(fault: Fault) -> None:
    if fault.mode is Mode.SLEEP:
        time.sleep(float(fault.argument))
    elif fault.mode is Mode.EXIT:
        os._exit(int(fault.argument))
    elif fault.mode is Mode.ERRNO:
        number: int = getattr(errno, fault.argument)
        raise OSError(number, os.strerror(number))
    else:
        raise InjectedFault(f"the fault point {fault.point!r}")


def _parsed(text: str) -> Fault:
    point, mode, argument, when, *more = [*text.split(":"), "", "", ""]
    if any(more):
        raise FaultError(f"{text!r} is no fault: point:mode:argument[:when] is expected")
    if point not in POINTS:
        raise FaultError(f"{point!r} is no fault point; known: {', '.join(POINTS)}")
    if mode not in POINTS[point].modes:
        raise FaultError(f"{point} has no mode {mode!r}; known: {', '.join(sorted(POINTS[point].modes))}")
    if not _fits(Mode(mode), argument):
        raise FaultError(f"{point}:{mode} has no argument {argument!r}: {_ARGUMENTS[Mode(mode)]}")
    visits, at, among = when.partition("@")
    first, dash, last = visits.partition("-")
    if (visits and not (first.isdecimal() and int(first) and (last.isdecimal() or not last))) or (at and not among):
        raise FaultError(f"{point} has no time {when!r}: N, N- or N-M of its visits, @value, or both as in 1-3@value")
    end = int(last) if last else None if dash or not visits else int(first)
    return Fault(point, Mode(mode), argument, int(first or 1), end, among)


_ARGUMENTS = {
    Mode.RAISE: "it takes none",
    Mode.ERRNO: "the name of an error, such as ENOSPC",
    Mode.SLEEP: "seconds from 0 to 86400",
    Mode.EXIT: "a status from 0 to 255",
    Mode.CUT: "bytes from 0 to 1000000",
}


def _fits(mode: Mode, argument: str) -> bool:
    if mode is Mode.RAISE:
        return not argument
    if mode is Mode.ERRNO:
        return argument in errno.errorcode.values()
    if mode is Mode.SLEEP:
        whole, _, part = argument.partition(".")
        return whole.isdecimal() and (not part or part.isdecimal()) and float(argument) <= 86400
    return argument.isdecimal() and int(argument) <= (255 if mode is Mode.EXIT else 1_000_000)
