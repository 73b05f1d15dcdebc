"""Compares commits: a Markdown table of what stored runs have measured, a row for each commit.

    python -m loadtests.history [FILE_OR_FOLDER ...]

Folders are searched for JSON files. Runs of different shapes, profiles, machines or sizes stand in different tables. Of several
runs of one commit the median counts. An arrow says where a commit is worse than the one before by more than a tenth.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from loadtests.catalogue import FIGURES
from loadtests.figures import median
from loadtests.machine import ROOT, Machine
from loadtests.plan import Profile
from loadtests.shapes import SHAPES
from loadtests.targets import Verdict

WORSE = 1.1


class Line(msgspec.Struct, frozen=True):
    """The part of a record that is compared; its samples are not read."""

    shape: str
    profile: str
    date: str
    commit: str
    machine: Machine
    sizes: Profile
    figures: dict[str, float | None]
    verdicts: list[Verdict]


class NotARunError(Exception):
    """A file has another form; the text names it."""


def read(paths: list[Path]) -> list[Line]:
    """The runs in the order of their dates. Raises NotARunError."""
    files = [file for path in paths for file in (sorted(path.rglob("*.json")) if path.is_dir() else [path])]
    return sorted(map(_line, files), key=lambda line: line.date)


def _line(file: Path) -> Line:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Line)
    except (OSError, msgspec.MsgspecError) as error:
        raise NotARunError(f"{file} is not a run: {error}") from error


def tables(lines: list[Line]) -> list[str]:
    """A table for each group of runs that can be compared."""
    groups: dict[tuple[str, str, Machine, bytes], list[Line]] = {}
    for line in lines:
        groups.setdefault((line.shape, line.profile, line.machine, msgspec.json.encode(line.sizes)), []).append(line)
    return [_table(group) for group in groups.values()]


def _table(lines: list[Line]) -> str:
    first = lines[0]
    names = [name for name in SHAPES[first.shape].figures if any(name in line.figures for line in lines)]
    machine = f"{first.machine.cores} cores of {first.machine.processor}, {first.machine.memory_gib} GiB"
    sizes = f"up to {first.sizes.most} users, {first.sizes.stage_s:g} s a stage"
    rows = [f"{first.shape}, {first.profile}: {machine}; {sizes}", ""]
    rows.append(f"| commit | date | runs | {' | '.join(names)} | targets missed |")
    rows.append("| --- " * (len(names) + 4) + "|")
    before: dict[str, float | None] = {}
    for commit in dict.fromkeys(line.commit for line in lines):
        runs = [line for line in lines if line.commit == commit]
        now = {name: median([value for run in runs if (value := run.figures.get(name)) is not None]) for name in names}
        cells = [_cell(name, now[name], before.get(name)) for name in names]
        missed = sorted({verdict.figure for run in runs for verdict in run.verdicts if not verdict.met})
        rows.append(
            f"| {commit} | {runs[-1].date[:10]} | {len(runs)} | {' | '.join(cells)} | {', '.join(missed) or 'none'} |"
        )
        before = {**before, **{name: value for name, value in now.items() if value is not None}}
    return "\n".join(rows)


def _cell(name: str, value: float | None, before: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}{' ▼' if before is not None and is_worse(name, value, before) else ''}"


def is_worse(name: str, value: float, before: float) -> bool:
    """By more than a tenth."""
    return value * WORSE < before if FIGURES[name].at_least else value > before * WORSE


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="*", help="var/loadtests without any.")
    options = parser.parse_args()
    paths = options.paths or [ROOT / "var" / "loadtests"]
    try:
        lines = read(paths)
    except NotARunError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n\n".join(tables(lines)) or "no runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
