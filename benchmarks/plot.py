"""Draws what `benchmarks.curve` has measured, as SVG: the curve with a line a server, and bars for the points.

    python -m benchmarks.plot FILE ... [--out DIRECTORY]

A picture is named after its file and its shape, and written beside the file unless `--out` says otherwise. It has no dates
or random names, so that the same figures give the same bytes.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.records import Run, read
from benchmarks.report import Section, sections

matplotlib.rcParams["svg.hashsalt"] = "dragoman"
matplotlib.rcParams["svg.fonttype"] = "none"
MARKS = "osDv^<>PX"


def draw(section: Section, target: Path) -> None:
    """One picture: the curve on the left, tokens per second and requests in time of the points on the right."""
    figure, (curve, speed, in_time) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained", width_ratios=(5, 4, 4))
    _curve(curve, section)
    _bars(speed, section, "output tokens per second", _speed)
    _bars(in_time, section, "% of requests within 2 s and 150 ms", _share_in_time)
    context, machine = section.context, section.context.machine
    figure.suptitle(
        f"{context.shape}, {context.dtype}, {machine.cores} cores of {machine.processor} ({machine.family_model}), "
        f"{context.commit}",
        fontsize=10,
    )
    figure.savefig(target, metadata={"Date": None})
    plt.close(figure)


def _speed(run: Run) -> float:
    return run.figures.tokens_per_s


def _user_speed(run: Run) -> float | None:
    return run.figures.user_tokens_per_s


def _share_in_time(run: Run) -> float:
    return 100 * run.figures.good_requests / run.figures.requests


def _curve(axes: Any, section: Section) -> None:
    """Up and right is better; labels are numbers of users."""
    for mark, server in zip(MARKS, section.servers, strict=False):
        cells = [cell for (_, _, name), cell in section.cells.items() if name == server and cell.in_curve]
        points = [(cell.median(_user_speed), cell.median(_speed), cell.users) for cell in cells]
        known = sorted((users, x, y) for x, y, users in points if x is not None and y is not None)
        axes.plot([x for _, x, _ in known], [y for _, _, y in known], marker=mark, label=server)
        for users, x, y in known:
            axes.annotate(str(users), (x, y), fontsize=7, textcoords="offset points", xytext=(4, 4))
    axes.set_xlabel("tokens per second of a user")
    axes.set_ylabel("output tokens per second")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def _bars(axes: Any, section: Section, label: str, value: Any) -> None:
    """Bars in groups: a group is a point, a bar a server. A server without undisturbed runs has none."""
    points = list(dict.fromkeys((case, work) for (case, work, _), cell in section.cells.items() if not cell.in_curve))
    width = 0.8 / max(1, len(section.servers))
    for number, server in enumerate(section.servers):
        places, heights = [], []
        for place, (case, work) in enumerate(points):
            cell = section.cells.get((case, work, server))
            height = cell.median(value) if cell is not None else None
            if height is not None:
                places.append(place + (number - (len(section.servers) - 1) / 2) * width)
                heights.append(height)
        bars = axes.bar(places, heights, width, label=server)
        axes.bar_label(bars, fmt="%.0f", fontsize=7)
    axes.set_xticks(range(len(points)), [case for case, _ in points])
    axes.set_ylabel(label)


def main() -> None:
    """A picture for each section of each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    for file in options.files:
        seen: Counter[str] = Counter()
        for section in sections(read([file])):
            if section.cells:
                context = section.context
                weights = "" if context.quantization == "none" else f"-{context.quantization}"
                name = f"{file.stem}-{context.shape}{weights}"
                seen[name] += 1
                suffix = f"-{seen[name]}" if seen[name] > 1 else ""
                target = (options.out or file.parent) / f"{name}{suffix}.svg"
                draw(section, target)
                print(target)


if __name__ == "__main__":
    main()
