"""The report of a run: one page with verdicts, figures and plots, which loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from loadtests.catalogue import FIGURES
from loadtests.figures import StageFigures
from loadtests.plots import plots
from loadtests.records import Record
from loadtests.shapes import SHAPES

STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .8em;border-bottom:1px solid #ddd;text-align:right}"
    "td:first-child,th:first-child{text-align:left}.missed{color:#b00;font-weight:bold}svg{max-width:100%;height:auto}"
)
STAGE_HEAD = (
    "stage", "users", "seconds", "requests", "outcomes", "tok/s", "tok/s a user", "answers/s", "TTFT p50 / p95 ms",
    "gap mean / p95 / p99 ms", "total p50 / p95 ms",
)  # fmt: skip


def write_report(records: list[Record], path: Path) -> None:
    """One section for each shape."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = [_head(records[0]), *(part for record in records for part in _section(record))]
    page = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Load test</title><style>{STYLE}</style></head>'
    path.write_text(page + "<body>" + "\n".join(body) + "</body></html>\n")


def _head(record: Record) -> str:
    machine = record.machine
    facts = f"commit {record.commit}, profile {record.profile}, {record.date}; {machine.cores} cores of {machine.processor}, "
    return f"<h1>Load test</h1><p>{escape(facts)}{machine.memory_gib} GiB, {escape(machine.system)}</p>"


def _section(record: Record) -> list[str]:
    verdicts = [
        (
            f"{escape(verdict.figure)} <small>{escape(FIGURES[verdict.figure].about)}</small>",
            _number(verdict.measured),
            f"{'≥' if FIGURES[verdict.figure].at_least else '≤'} {verdict.target:g}",
            "met" if verdict.met else '<span class="missed">missed</span>',
        )
        for verdict in record.verdicts
    ]
    parts = [f"<h2>{escape(record.shape)}</h2><p>{escape(SHAPES[record.shape].about)}</p>"]
    parts.append(_table(("figure", "measured", "target", ""), verdicts))
    if record.knee_users is not None:
        parts.append(
            f"<p>The knee is at {record.knee_users} users: the next step gives less than a tenth more tokens/s.</p>"
        )
    parts += plots(record)
    parts.append(_table(STAGE_HEAD, [_stage(stage) for stage in record.stages]))
    if record.failures:
        rows = [(escape(reason), str(count)) for reason, count in record.failures.items()]
        parts.append(_table(("failure", "requests"), rows))
    return parts


def _stage(stage: StageFigures) -> tuple[str, ...]:
    return (
        escape(stage.stage),
        str(stage.users),
        f"{stage.seconds:.1f}",
        str(stage.requests),
        escape(", ".join(f"{count} {outcome}" for outcome, count in stage.outcomes.items())),
        f"{stage.tokens_per_s:.0f}",
        _number(stage.user_tokens_per_s),
        f"{stage.answers_per_s:.1f}",
        _numbers(stage.ttft_p50_ms, stage.ttft_p95_ms),
        _numbers(stage.gap_mean_ms, stage.gap_p95_ms, stage.gap_p99_ms),
        _numbers(stage.total_p50_ms, stage.total_p95_ms),
    )


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Of cells that are HTML already."""
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{titles}</tr>{lines}</table>"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _numbers(*values: float | None) -> str:
    return " / ".join("-" if value is None else f"{value:.1f}" for value in values)
