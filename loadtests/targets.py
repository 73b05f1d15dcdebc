"""Targets: a bound for each figure of a shape, by profile. A figure that was not measured misses its target."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from loadtests.catalogue import FIGURES
from loadtests.plan import PROFILES
from loadtests.shapes import SHAPES


class TargetsError(Exception):
    """A file of targets cannot be used; the text names the place."""


class Verdict(msgspec.Struct):
    """A figure beside its target."""

    figure: str
    target: float
    measured: float | None
    met: bool

    def text(self) -> str:
        """One line."""
        sign = "at least" if FIGURES[self.figure].at_least else "at most"
        measured = "not measured" if self.measured is None else f"{self.measured:.4g}"
        return f"{'met   ' if self.met else 'MISSED'} {self.figure}: {measured}, {sign} {self.target:g}"


Targets = dict[str, dict[str, float]]
"""Shape, then figure, then bound."""


def load_targets(path: Path, profile: str, shapes: Iterable[str]) -> Targets:
    """The targets of these shapes; raises TargetsError unless the whole file makes sense and has some for each shape."""
    try:
        found = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TargetsError(f"{path}: {error}") from error
    for name, tables in found.items():
        if name not in PROFILES:
            raise TargetsError(f"{path}: unknown profile {name}; known: {', '.join(PROFILES)}")
        for shape, targets in _table(path, name, tables).items():
            _check(path, name, shape, _table(path, f"{name}.{shape}", targets))
    wanted = {shape: _inherited(found, profile, shape) for shape in shapes}
    for shape, targets in wanted.items():
        if not targets:
            raise TargetsError(f"{path}: no targets for {profile}.{shape}; a run without targets cannot fail")
    return wanted


def _inherited(found: dict[str, Any], profile: str, shape: str) -> dict[str, float]:
    """A profile's targets for a shape: those of the profile before it, with its own in their place."""
    lineage = list(PROFILES)[: list(PROFILES).index(profile) + 1]
    merged: dict[str, float] = {}
    for name in lineage:
        merged |= found.get(name, {}).get(shape, {})
    return merged


def judged(targets: dict[str, float], measured: dict[str, float | None]) -> list[Verdict]:
    """A verdict for each target."""
    return [
        Verdict(name, bound, measured.get(name), _met(name, bound, measured.get(name)))
        for name, bound in targets.items()
    ]


def _met(name: str, bound: float, value: float | None) -> bool:
    if value is None:
        return False
    return value >= bound if FIGURES[name].at_least else value <= bound


def _table(path: Path, name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TargetsError(f"{path}: {name} must be a table")
    return value


def _check(path: Path, profile: str, shape: str, targets: dict[str, Any]) -> None:
    if shape not in SHAPES:
        raise TargetsError(f"{path}: unknown shape {profile}.{shape}; known: {', '.join(SHAPES)}")
    for name, bound in targets.items():
        place = f"{path}: {profile}.{shape}.{name}"
        if name not in SHAPES[shape].figures:
            raise TargetsError(f"{place} is not a figure of this shape; known: {', '.join(SHAPES[shape].figures)}")
        figure = FIGURES[name]
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not figure.low <= bound <= figure.high:
            raise TargetsError(f"{place} must be a number from {figure.low:g} to {figure.high:g}")
