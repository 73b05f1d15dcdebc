"""Show requests and tokens of some days: of all, or by key, deployment, adapter, end user or day."""

from __future__ import annotations

import csv
from datetime import UTC, datetime, timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from management import usage_store
from management.usage import COUNTED

MOST_DAYS = 3650


class Command(BaseCommand):
    """`manage.py usage [--by key] [--days 30] [--csv]`."""

    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the grouping, the days and the form."""
        parser.add_argument("--by", choices=usage_store.GROUPS, default="key")
        parser.add_argument("--days", type=int, default=30, help="The last days of UTC, today included.")
        parser.add_argument("--csv", action="store_true", help="As CSV.")

    def handle(self, *args: Any, **options: Any) -> None:
        """Print a row for each group, and one of all."""
        today, by = datetime.now(UTC).date(), options["by"]
        since = today - timedelta(days=min(max(options["days"], 1), MOST_DAYS) - 1)
        groups = list(usage_store.grouped(by, since, today))
        rows = [[str(group["name"]), *(group[name] for name in COUNTED)] for group in groups]
        if options["csv"]:
            writer = csv.writer(self.stdout, lineterminator="")
            writer.writerow([by, *COUNTED])
            for row in rows:
                writer.writerow(row)
            return
        rows.append(["all", *(sum(group[name] for group in groups) for name in COUNTED)])
        table = [[by.replace("_", " "), *(name.replace("_", " ") for name in COUNTED)]]
        table += [[row[0] or "none", *(f"{number:,}" for number in row[1:])] for row in rows]
        widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
        for first, *numbers in table:
            cells = [first.ljust(widths[0]), *(n.rjust(w) for n, w in zip(numbers, widths[1:], strict=True))]
            self.stdout.write("  ".join(cells))
