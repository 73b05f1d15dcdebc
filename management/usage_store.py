"""Stores sums of usage, reads them grouped, and forgets them.

Sums are added to the day's rows, so that several processes may write the same ones. A process numbers its batches,
and the number is written in the batch's own transaction: a batch whose answer was lost is not added twice.
"""

from __future__ import annotations

from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.db import connection, transaction
from django.db.models import OuterRef, QuerySet, Subquery, Sum

from management.models import ApiKey, Deployment, UsageDay, WebProcess
from management.usage import COUNTED, Sums, UsageOf

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ROWS_AT_ONCE = 500
END_USERS_KEPT = timedelta(days=30)
"""End users are personal data: after these days their rows are added up to one without a name."""
FORGOTTEN_AT_ONCE = 5000
GROUPS = ("day", *UsageOf._fields[1:])
TABLE = UsageDay._meta.db_table


def store(process: str, number: int, batch: Mapping[UsageOf, Sums]) -> None:
    """Add a process's batch to the rows, unless this number of its was added before."""
    process_row = WebProcess.objects.filter(name=process)
    with transaction.atomic():
        if process_row.filter(usage_number__gte=number).exists():
            return
        _add(batch)
        process_row.update(usage_number=number)  # none once the process has signed off


def _add(batch: Mapping[UsageOf, Sums]) -> None:
    """In one order for all processes: two that locked the same rows in different orders would wait for each other.

    Django's own upsert can only replace values.
    """
    quote = connection.ops.quote_name
    keys, sums = list(UsageOf._fields), [*COUNTED, "last_at"]
    row = f"({', '.join(['%s'] * len(keys + sums))})"
    added = [f"{quote(name)} = {quote(TABLE)}.{quote(name)} + excluded.{quote(name)}" for name in COUNTED]
    later = f"{quote('last_at')} = excluded.{quote('last_at')}"
    items = sorted(batch.items())
    with connection.cursor() as cursor:
        for begin in range(0, len(items), ROWS_AT_ONCE):
            some = items[begin : begin + ROWS_AT_ONCE]
            cursor.execute(
                f"INSERT INTO {quote(TABLE)} ({', '.join(map(quote, keys + sums))}) "
                f"VALUES {', '.join([row] * len(some))} "
                f"ON CONFLICT ({', '.join(map(quote, keys))}) DO UPDATE SET {', '.join([*added, later])}",
                [_value(each) for of, one in some for each in (*of, *(getattr(one, name) for name in sums))],
            )


def _value(value: Any) -> Any:
    """As the database stores it."""
    if isinstance(value, datetime):
        return connection.ops.adapt_datetimefield_value(value)
    return connection.ops.adapt_datefield_value(value) if isinstance(value, date) else value


def spent(day: date) -> dict[str, int]:
    """The tokens of a day by key, of all processes: of the keys that have a limit a day."""
    limited = list(ApiKey.objects.filter(tokens_per_day__gt=0, revoked=False).values_list("prefix", flat=True))
    rows = UsageDay.objects.filter(day=day, key__in=limited).order_by().values("key")
    sums = rows.annotate(tokens=Sum("prompt_tokens") + Sum("output_tokens"))
    return {row["key"]: row["tokens"] for row in sums}


def forget(today: date, kept_days: int) -> None:
    """Remove rows of more than `kept_days` ago, and the end users' names of those of more than thirty. Several
    processes may do so at once: each row is taken by one.
    """
    while _removed(UsageDay.objects.filter(day__lt=today - timedelta(days=kept_days))):
        pass
    while _nameless(today - END_USERS_KEPT):
        pass


def _removed(rows: Any) -> int:
    with transaction.atomic():
        found = rows.filter(pk__in=list(rows.order_by("pk").values_list("pk", flat=True)[:FORGOTTEN_AT_ONCE]))
        return int(found.delete()[0])


def _nameless(before: date) -> int:
    """Add up some rows with names; returns how many there were."""
    quote = connection.ops.quote_name
    returned = ", ".join(map(quote, ["day", *GROUPS[1:4], *COUNTED, "last_at"]))
    some = (
        f"SELECT {quote('id')} FROM {quote(TABLE)} WHERE {quote('day')} < %s AND {quote('end_user')} <> '' "
        f"ORDER BY {quote('id')} LIMIT {FORGOTTEN_AT_ONCE}"
    )
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(
                f"DELETE FROM {quote(TABLE)} WHERE {quote('id')} IN ({some}) RETURNING {returned}", [_value(before)]
            )
            rows = cursor.fetchall()
        sums: dict[UsageOf, Sums] = {}
        for day, key, deployment, adapter, requests, failed, prompt, cached, output, last_at in rows:
            of = UsageOf(UsageDay._meta.get_field("day").to_python(day), key, deployment, adapter, "")
            last = UsageDay._meta.get_field("last_at").to_python(last_at)
            sums.setdefault(of, Sums()).add(Sums(requests, failed, prompt, cached, output, last))
        _add(sums)
    return len(rows)


def grouped(by: str, since: date, until: date) -> Iterable[dict[str, Any]]:
    """The sums from one day to another, both included, by a field of `GROUPS`, with a `name` for people: the most
    output first, days in their order.
    """
    rows = UsageDay.objects.filter(day__gte=since, day__lte=until).order_by().values(by)
    sums = rows.annotate(**{name: Sum(name) for name in COUNTED})
    sums = sums.order_by(by) if by == "day" else sums.order_by("-output_tokens", "-prompt_tokens", by)
    names: dict[Any, str] = {}
    if by == "key":
        names = dict(ApiKey.objects.values_list("prefix", "name"))
    elif by == "deployment":
        names = dict(Deployment.objects.values_list("public_id", "name"))
    return [{**row, "name": names.get(row[by], row[by])} for row in sums]


def named(rows: QuerySet[UsageDay]) -> QuerySet[UsageDay]:
    """With `key_name` and `deployment_name`; null where they are gone."""
    keys = ApiKey.objects.filter(prefix=OuterRef("key")).values("name")[:1]
    deployments = Deployment.objects.filter(public_id=OuterRef("deployment")).values("name")[:1]
    return rows.annotate(key_name=Subquery(keys), deployment_name=Subquery(deployments))
