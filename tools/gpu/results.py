"""The campaign's file: JSON lines, one for each figure or error, which the next call reads and continues; and its
table.

A cell is what is measured in one go; it may have several figures. It is written whole, or not at all.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

COUNTS = ("passed", "skipped", "failed")
"""Units of which the figures of a row are added up."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A number in a row of the table. `column`: how many streams or rows; None where there is no such number.

    `share`: the part of a time that reading what must be read once takes at the rate of a copy; None: not known.
    """

    row: str
    unit: str
    value: float
    column: int | None = None
    share: float | None = None


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the file: a figure, why the cell has none, or with neither that all of the part's cells have theirs."""

    part: str
    cell: str
    device: str
    commit: str
    at: str
    figure: Figure | None = None
    error: str = ""


class Results:
    """The file of one device's figures. Several processes may append to it, one after another."""

    def __init__(self, path: Path, device: str, commit: str) -> None:
        self.path, self.device, self.commit = path, device, commit

    def entries(self) -> list[Entry]:
        """Lines of this device."""
        return [entry for entry in read(self.path) if entry.device == self.device]

    def done(self, part: str) -> set[str]:
        """The part's cells that have figures."""
        return {e.cell for e in self.entries() if e.part == part and e.figure is not None}

    def finished(self) -> set[str]:
        """The parts of which nothing is missing."""
        return {e.part for e in self.entries() if e.figure is None and not e.error}

    def failures(self) -> list[Entry]:
        """The last error of each cell that has no figures."""
        entries = self.entries()
        done = {(e.part, e.cell) for e in entries if e.figure is not None}
        return list({(e.part, e.cell): e for e in entries if e.error and (e.part, e.cell) not in done}.values())

    def finish(self, part: str) -> None:
        """Write down that nothing of the part is missing."""
        self._append([self._entry(part, "")])

    def add(self, part: str, cell: str, figures: Iterable[Figure], error: str = "") -> None:
        """Append a cell, and have it on the disk before it is said to be done."""
        self._append([self._entry(part, cell, figure) for figure in figures])
        if error:
            self._append([self._entry(part, cell, None, error)])

    def _entry(self, part: str, cell: str, figure: Figure | None = None, error: str = "") -> Entry:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return Entry(part=part, cell=cell, device=self.device, commit=self.commit, at=at, figure=figure, error=error)

    def _append(self, made: list[Entry]) -> None:
        with self.path.open("ab") as file:
            if file.tell() and not self._ends_a_line():  # a call was cut off as it wrote
                file.write(b"\n")
            file.write(b"".join(msgspec.json.encode(entry) + b"\n" for entry in made))
            file.flush()
            os.fsync(file.fileno())

    def _ends_a_line(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"


def read(path: Path) -> list[Entry]:
    """All lines. One that was cut off is left out."""
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            found.append(msgspec.json.decode(line, type=Entry))
        except msgspec.DecodeError:
            continue
    return found


def devices(path: Path) -> list[str]:
    """Those that the file has lines of."""
    return list(dict.fromkeys(entry.device for entry in read(path)))


def table(entries: list[Entry]) -> str:
    """Markdown: a row for each measured thing and unit, a column for each number of streams or rows; shares in
    parentheses.
    """
    rows: dict[tuple[str, str, str], dict[int | None, Figure]] = {}
    for entry in entries:
        if (figure := entry.figure) is not None:
            columns = rows.setdefault((entry.part, figure.row, figure.unit), {})
            before = columns.get(figure.column)
            if before is not None and figure.unit in COUNTS:
                figure = msgspec.structs.replace(figure, value=before.value + figure.value)
            columns[figure.column] = figure
    numbers = sorted({column for columns in rows.values() for column in columns if column is not None})
    lines = [f"| part | measured | unit | | {' | '.join(map(str, numbers))} |", f"|{' --- |' * (4 + len(numbers))}"]
    for (part, row, unit), columns in rows.items():
        values = [written(columns.get(column)) for column in (None, *numbers)]
        lines.append(f"| {part} | {row} | {unit} | {' | '.join(values)} |")
    return "\n".join(lines)


def written(figure: Figure | None) -> str:
    """Three digits, or all of a whole number."""
    if figure is None:
        return ""
    value = figure.value
    number = f"{value:.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"
    return number if figure.share is None else f"{number} ({figure.share:.2f})"


def commits(entries: list[Entry]) -> list[str]:
    """Those at which the figures were taken, oldest first."""
    return list(dict.fromkeys(e.commit for e in entries if e.figure is not None))
