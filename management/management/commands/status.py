"""`status`: deployments, workers, load and the last scaling decisions; live in a terminal."""

from __future__ import annotations

import json
import time
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import Error
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from management.database_errors import with_advice
from management.overview import overview, shortcomings

INTERVAL_S = 1.0
UNREADABLE = 2
"""The exit status if the registry cannot be read."""
BROKEN = ("deployment", "model", "worker", "doing", "rule", "seen", "host, process and name")
"""Columns whose texts may take several lines."""
COLOURS = {
    "active": "green", "ready": "green", "provisioning": "cyan", "starting": "cyan", "loading": "cyan",
    "failed": "red", "none leads": "red", "draining": "yellow", "deleting": "yellow",
}  # fmt: skip


class Command(BaseCommand):
    """`manage.py status [--once] [--json] [--check]`: the exit status is 0, 2 if the registry cannot be read."""

    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the switches."""
        parser.add_argument("--once", action="store_true", help="Print the present state and end.")
        parser.add_argument("--json", action="store_true", help="The same as JSON, once.")
        parser.add_argument(
            "--check", action="store_true", help="Once; the exit status is 1 if something is not as it was asked for."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Print once, or until Ctrl-C; raises CommandError."""
        try:
            if options["json"] or options["check"]:
                found = overview()
                self._print_once(found, as_json=options["json"])
                if options["check"] and (wrong := shortcomings(found)):
                    raise CommandError("; ".join(wrong))
                return
            console = Console(file=None if self.stdout.isatty() else self.stdout)
            if options["once"] or not console.is_terminal:
                console.print(render(overview()))
                return
            with Live(render(overview()), console=console, auto_refresh=False) as live:
                while True:
                    time.sleep(INTERVAL_S)
                    live.update(render(overview()), refresh=True)
        except KeyboardInterrupt:
            return
        except Error as error:
            raise CommandError(f"the registry cannot be read: {with_advice(error)}", returncode=UNREADABLE) from error

    def _print_once(self, found: dict[str, Any], *, as_json: bool) -> None:
        if as_json:
            self.stdout.write(json.dumps(found, indent=2))
        else:
            Console(file=self.stdout).print(render(found))


def render(found: dict[str, Any]) -> Group:
    """The overview as tables."""
    deployments = _table("deployment", "model", "state", "workers", "running", "waiting", "held", "USD/h")
    workers = _table("worker", "epoch", "role", "state", "requests", "process", "doing")
    decisions = _table("at", "deployment", "rule", "workers", "seen")
    processes = _table("what", "host, process and name")
    notes: list[Text] = []
    for row in found["deployments"]:
        limits = f"{row['min_workers']}…{row['max_workers']}" + (", sleeps" if row["scale_to_zero"] else "")
        ready = sum(worker["state"] == "ready" for worker in row["workers"])
        note = row["reason"] or (f"blocked by {row['scale_blocked']}" if row["scale_blocked"] else "")
        deployments.add_row(
            row["name"], row["model"], _coloured(row["state"]), f"{ready}/{row['workers_wanted']} ({limits})",
            str(row["running"]), str(row["waiting"]), str(row["held"]), f"{row['price_per_hour']:g}",
        )  # fmt: skip
        if note:
            notes.append(Text(f" {row['name']}: {note}"))
        for worker in row["workers"]:
            workers.add_row(
                worker["worker"], str(worker["epoch"]), worker["role"], _coloured(worker["state"]), str(worker["running"]),
                str(worker["process_id"] or ""), worker["doing"],
            )  # fmt: skip
        for decision in row["decisions"]:
            metric = decision.get("metric")
            seen = "" if metric is None else f"{metric:.3g} of {decision['lower']:g}…{decision['upper']:g}"
            counts = f"{decision['live']} → {decision['wanted']}"
            decisions.add_row(decision["at"][11:19], row["name"], decision["rule"], counts, seen)
    processes.add_row("reconcile", found["leader"] or _coloured("none leads"))
    if not found["leader"]:
        notes.append(Text(" No process leads: states are as they were last recorded.", style="red"))
    for name in found["web_processes"]:
        processes.add_row("web", name)
    parts: list[Any] = [deployments, *notes]
    for title, table in (("Workers", workers), ("Processes", processes), ("Last scaling decisions", decisions)):
        if table.row_count:
            parts += [Text(), Text(title, style="bold"), table]
    return Group(*parts)


def _table(*titles: str) -> Table:
    """A table for 80 columns: long names are broken, and what is short stays whole."""
    table = Table(box=None)
    for title in titles:
        long = title in BROKEN
        table.add_column(title, no_wrap=not long, overflow="fold" if long else "ellipsis")
    return table


def _coloured(state: str) -> Text:
    return Text(state, style=COLOURS.get(state, ""))
