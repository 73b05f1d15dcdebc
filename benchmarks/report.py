"""Prints Markdown tables of what `benchmarks.curve` has measured: medians over rounds, and ratios to each other server.

    python -m benchmarks.report FILE ... [--base dragoman]

A ratio is the median of the base's tokens per second over the other's, round by round. Disturbed runs are in neither, and
are counted. What was measured on different machines, commits, types or numbers of threads stands in different tables.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.records import Context, Failed, Record, Run, Started, read

HEAD = (
    "case", "server", "tok/s", "tok/s a user", "ratio to it", "TTFT p50 / p95 ms", "gap p50 / p95 / longest ms",
    "in time", "CPU s server / client", "others' cores", "rounds",
)  # fmt: skip


@dataclass
class Cell:
    """The runs of one case on one server, by round. A round has a run here only if one was undisturbed."""

    work: str
    in_curve: bool
    users: int
    runs: dict[int, Run] = field(default_factory=dict)
    rounds: set[int] = field(default_factory=set)

    @property
    def disturbed(self) -> int:
        """Rounds without an undisturbed run."""
        return len(self.rounds) - len(self.runs)

    def median(self, value: Callable[[Run], float | None]) -> float | None:
        """Over the rounds that count; None if none does."""
        values = [found for run in self.runs.values() if (found := value(run)) is not None]
        return statistics.median(values) if values else None

    def ratio(self, other: Cell) -> float | None:
        """Its tokens per second over another's, in the rounds of both."""
        both = self.runs.keys() & other.runs.keys()
        ratios = [self.runs[i].figures.tokens_per_s / other.runs[i].figures.tokens_per_s for i in both]
        return statistics.median(ratios) if ratios else None


@dataclass
class Section:
    """All that belongs into one table."""

    context: Context
    cells: dict[tuple[str, str, str], Cell] = field(default_factory=dict)
    """By case, work and server, in the order of their first runs."""
    started: dict[str, Started] = field(default_factory=dict)
    failed: list[Failed] = field(default_factory=list)

    @property
    def servers(self) -> list[str]:
        """In the order of their first runs."""
        return list(dict.fromkeys(server for _, _, server in self.cells))


def sections(records: list[Record]) -> list[Section]:
    """One for each context, in the order of the records."""
    found: dict[Context, Section] = {}
    for record in records:
        section = found.setdefault(record.context, Section(record.context))
        if isinstance(record, Started):
            section.started[record.server] = record
        elif isinstance(record, Failed):
            section.failed.append(record)
        else:
            key = (record.case, record.work, record.server)
            cell = section.cells.setdefault(key, Cell(record.work, record.in_curve, record.users))
            cell.rounds.add(record.round)
            if not record.disturbed:
                cell.runs[record.round] = record
    return list(found.values())


def table(section: Section, base: str) -> list[str]:
    """Rows of Markdown, the cases' order first."""
    rows = [HEAD, ("---",) * len(HEAD)]
    works = dict.fromkeys((case, work) for case, work, _ in section.cells)
    for case, work in works:
        for server in section.servers:
            if (cell := section.cells.get((case, work, server))) is not None:
                first = section.cells.get((case, work, base))
                ratio = first.ratio(cell) if first is not None and server != base else None
                rows.append((case, server, *_figures(cell, ratio)))
    return [f"| {' | '.join(row)} |" for row in rows]


def _figures(cell: Cell, ratio: float | None) -> tuple[str, ...]:
    rounds = f"{len(cell.runs)} of {len(cell.rounds)}" + (f", {cell.disturbed} disturbed" if cell.disturbed else "")
    if not cell.runs:
        return ("disturbed", *[""] * (len(HEAD) - 4), rounds)

    def middle(value: Callable[[Run], float | None], digits: int = 0) -> str:
        found = cell.median(value)
        return "" if found is None else f"{found:.{digits}f}"

    ttft = (middle(lambda run: run.figures.ttft_p50_ms), middle(lambda run: run.figures.ttft_p95_ms))
    gaps = (
        middle(lambda run: run.figures.gap_p50_ms, 1),
        middle(lambda run: run.figures.gap_p95_ms, 1),
        middle(lambda run: run.figures.gap_longest_ms),
    )
    cpu = (middle(lambda run: run.usage.server_cpu_s, 1), middle(lambda run: run.usage.client_cpu_s, 1))
    requests = next(iter(cell.runs.values())).figures.requests
    return (
        middle(lambda run: run.figures.tokens_per_s, 1),
        middle(lambda run: run.figures.user_tokens_per_s, 1),
        "" if ratio is None else f"{ratio:.2f}",
        " / ".join(ttft),
        " / ".join(gaps),
        f"{middle(lambda run: run.figures.good_requests)} of {requests}",
        " / ".join(cpu),
        middle(lambda run: run.usage.other_cores, 2),
        rounds,
    )


def _weights(context: Context) -> str:
    return "" if context.quantization == "none" else f"weights in {context.quantization}, "


def text(section: Section, base: str) -> str:
    """A section as Markdown."""
    context, machine = section.context, section.context.machine
    lines = [
        f"### {context.shape}, {context.dtype}, {_weights(context)}{context.threads} threads",
        "",
        f"{machine.processor} ({machine.family_model}; {', '.join(machine.flags)}), {machine.cores} cores, "
        f"{machine.memory_gib} GiB; commit {context.commit}; the ratio is {base}'s tok/s to the server's; in time: first "
        "token within 2 s and no gap over 150 ms.",
        "",
    ]
    for work in dict.fromkeys(f"{case}: {work}" for case, work, _ in section.cells):
        lines.append(f"- {work}")
    lines += ["", *table(section, base), ""]
    for name, started in section.started.items():
        versions = ", ".join(f"{package} {version}" for package, version in started.versions.items())
        idle = f"{started.idle_cores:.2f} cores idle{', held while others ran' if started.held else ''}"
        lines.append(f"- {name}: {versions or 'version unknown'}; ready after {started.start_s:.0f} s; {idle}")
    for failed in section.failed:
        where = f" in {failed.case}, round {failed.round}" if failed.case else ""
        lines.append(f"- failed: {failed.server or 'all'} ({failed.stage}{where}): {failed.text.splitlines()[0]}")
    return "\n".join(lines)


def main() -> None:
    """Print all sections of the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--base", default="dragoman", help="The server that others are compared with.")
    options = parser.parse_args()
    print("\n\n".join(text(section, options.base) for section in sections(read(options.files))))


if __name__ == "__main__":
    main()
