"""Draws a run as SVG, for a page that needs nothing else."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from loadtests.figures import percentile
from loadtests.records import Record
from loadtests.samples import Outcome

matplotlib.rcParams["svg.hashsalt"] = "dragoman"
matplotlib.rcParams["svg.fonttype"] = "none"
COLOURS = {Outcome.OK: "tab:blue", Outcome.REFUSED: "tab:orange"}
BAD = "tab:red"
MIB_AXIS = "MiB"


def plots(record: Record) -> list[str]:
    """The pictures of a run, each an <svg> element."""
    found = [_drawn(10, 3.2, lambda axes: _requests(axes, record))]
    found.append(_drawn(10, 2.6, lambda axes: _speed(axes, record)))
    if record.curve:
        found.insert(0, _drawn(5, 4, lambda axes: _curve(axes, record)))
    if record.observations:
        found.append(_drawn(10, 2.6, lambda axes: _memory(axes, record)))
    return found


def _drawn(width: float, height: float, draw: Callable[[Any], None]) -> str:
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    draw(axes)
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None})
    plt.close(figure)
    text = written.getvalue()
    return text[text.index("<svg") :]


def _curve(axes: Any, record: Record) -> None:
    """Up and right is better; labels are numbers of users."""
    points = [(stage.user_tokens_per_s, stage.tokens_per_s, stage.users) for stage in record.curve]
    known = [(x, y, users) for x, y, users in points if x is not None]
    axes.plot([x for x, _, _ in known], [y for _, y, _ in known], marker="o")
    for x, y, users in known:
        axes.annotate(str(users), (x, y), fontsize=8, textcoords="offset points", xytext=(5, 4))
        if users == record.knee_users:
            axes.plot([x], [y], marker="o", markersize=12, fillstyle="none", color=BAD)
    axes.set_xlabel("tokens/s of a user")
    axes.set_ylabel("tokens/s of the system")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)


def _requests(axes: Any, record: Record) -> None:
    """Each request at the time of sending: its TTFT, or its whole time if it has none."""
    for outcome in Outcome:
        samples = [sample for sample in record.samples if sample.outcome is outcome]
        if samples:
            axes.scatter(
                [sample.at_s - _zero(record) for sample in samples],
                [sample.total_ms if sample.ttft_ms is None else sample.ttft_ms for sample in samples],
                s=6, label=f"{outcome}: {len(samples)}", color=COLOURS.get(outcome, BAD), alpha=0.6, linewidths=0,
            )  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylabel("ms to first token")
    _stages(axes, record)
    if record.samples:
        axes.legend(frameon=False, fontsize=8, loc="upper right")


def _speed(axes: Any, record: Record) -> None:
    """Tokens of all answers by seconds."""
    zero, end = _zero(record), max((window.end_s for window in record.windows), default=0.0)
    seconds = range(max(1, round(end - zero)))
    streams = [sample for sample in record.samples if sample.outcome is Outcome.OK]
    tokens = [0.0] * len(seconds)
    for sample in streams:
        first, last = int(sample.at_s - zero), int(sample.end_s - zero)
        for second in range(max(0, first), min(len(tokens), last + 1)):
            tokens[second] += sample.tokens_between(zero + second, zero + second + 1)
    axes.step(list(seconds), tokens, where="post")
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0, top=1.1 * (percentile(tokens, 0.995) or 1) + 1)
    _stages(axes, record)


def _memory(axes: Any, record: Record) -> None:
    """Of each process of the server."""
    for pid in sorted({pid for seen in record.observations for pid in seen.rss_mib}):
        points = [(seen.at_s - _zero(record), seen.rss_mib[pid]) for seen in record.observations if pid in seen.rss_mib]
        axes.plot([x for x, _ in points], [y for _, y in points], linewidth=1)
    axes.set_ylabel(MIB_AXIS)
    axes.set_ylim(bottom=0)
    _stages(axes, record)


def _zero(record: Record) -> float:
    return record.windows[0].begin_s if record.windows else 0.0


def _stages(axes: Any, record: Record) -> None:
    """Names along the top, and seconds along the bottom."""
    for number, window in enumerate(record.windows):
        begin, end = window.begin_s - _zero(record), window.end_s - _zero(record)
        axes.axvspan(begin, end, color="black", alpha=0.03 if number % 2 else 0.07, linewidth=0)
        axes.text((begin + end) / 2, 1.01, window.stage, transform=axes.get_xaxis_transform(), ha="center", fontsize=7)
    axes.set_xlabel("s")
