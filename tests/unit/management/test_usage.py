"""How usage is stored, added up, shown and forgotten."""

from __future__ import annotations

import csv
import io
import threading
from datetime import UTC, datetime, timedelta

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import DatabaseError
from django.urls import reverse

from management import usage_store
from management.models import UsageDay, WebProcess
from management.services.keys import create_key
from management.snapshot import KeyLimits
from management.usage import Sums, UsageOf
from management.usage_writer import UsageWriter

pytestmark = pytest.mark.django_db
NOW = datetime(2026, 3, 2, 12, tzinfo=UTC)
DAY = NOW.date()


def of(key="k", end_user="", day=DAY, deployment="d", adapter="") -> UsageOf:
    return UsageOf(day, key, deployment, adapter, end_user)


def rows() -> dict[tuple, tuple]:
    return {
        (row.day, row.key, row.end_user): (
            row.requests,
            row.failed,
            row.prompt_tokens,
            row.cached_tokens,
            row.output_tokens,
        )
        for row in UsageDay.objects.all()
    }


def test_batches_of_all_processes_are_added_up():
    usage_store.store("a", 1, {of(): Sums(1, 0, 10, 5, 3, NOW), of("other"): Sums(1, 1, 0, 0, 0, NOW)})
    usage_store.store("b", 1, {of(): Sums(2, 1, 20, 0, 4, NOW + timedelta(seconds=5))})
    assert rows() == {(DAY, "k", ""): (3, 1, 30, 5, 7), (DAY, "other", ""): (1, 1, 0, 0, 0)}
    assert UsageDay.objects.get(key="k").last_at == NOW + timedelta(seconds=5)


def test_a_batch_whose_answer_was_lost_is_not_added_twice():
    WebProcess.objects.create(name="a", seen_at=NOW, report_number=7)
    for _ in range(2):
        usage_store.store("a", 1, {of(): Sums(1, 0, 10, 0, 3, NOW)})
    usage_store.store("a", 2, {of(): Sums(1, 0, 10, 0, 3, NOW)})
    assert rows() == {(DAY, "k", ""): (2, 0, 20, 0, 6)}
    assert WebProcess.objects.get(name="a").report_number == 7


def test_a_thousand_rows_at_once():
    usage_store.store("a", 1, {of(f"k{n}"): Sums(1, 0, 1, 0, 1, NOW) for n in range(1200)})
    assert UsageDay.objects.count() == 1200


def test_end_users_are_forgotten_after_thirty_days_and_rows_after_all():
    days = [DAY - timedelta(days=n) for n in (401, 400, 31, 30)]
    for day in days:
        for name in ("", "anna", "bob"):
            usage_store.store(f"p{name}{day}", 1, {of("k", name, day): Sums(1, 0, 10, 1, 3, NOW)})
    for _ in range(2):
        usage_store.forget(DAY, 400)
    assert rows() == {
        (days[1], "k", ""): (3, 0, 30, 3, 9), (days[2], "k", ""): (3, 0, 30, 3, 9),
        **{(days[3], "k", name): (1, 0, 10, 1, 3) for name in ("", "anna", "bob")},
    }  # fmt: skip


def test_what_keys_with_a_limit_a_day_spent():
    limited, _ = create_key("limited", ["infer"], "tester", limits=KeyLimits(tokens_per_day=1000))
    free, _ = create_key("free", ["infer"], "tester")
    for number, process in enumerate("ab"):
        batch = {of(key.prefix, user): Sums(1, 0, 10, 5, 3, NOW) for key in (limited, free) for user in ("", "anna")}
        usage_store.store(
            process, 1, {**batch, of(limited.prefix, day=DAY - timedelta(days=number + 1)): Sums(9, 0, 9, last_at=NOW)}
        )
    assert usage_store.spent(DAY) == {limited.prefix: 52}


class Source:
    """Gives batches as a recorder does."""

    def __init__(self, *batches):
        self.waiting, self.now = list(batches), {}

    def batch(self):
        return self.now

    def stored(self):
        self.now = {}

    def spent(self, day, tokens):
        self.told = day, tokens

    def refresh(self):
        if not self.now and self.waiting:
            self.now = self.waiting.pop(0)


@pytest.mark.django_db(transaction=True)
def test_the_writer_stores_what_is_left_at_its_end():
    stop = threading.Event()
    stop.set()
    source = Source({of(): Sums(1, 0, 10, 0, 3, NOW)}, {of(): Sums(1, 0, 1, 0, 1, NOW)})
    source.refresh()
    UsageWriter("a", source, 400).run(stop)
    assert [row.output_tokens for row in UsageDay.objects.all()] == [4]


@pytest.mark.django_db(transaction=True)
def test_a_batch_waits_for_the_database(monkeypatch):
    store, failures = usage_store.store, [DatabaseError("away")]

    def failing(*arguments):
        if failures:
            raise failures.pop()
        store(*arguments)

    monkeypatch.setattr(usage_store, "store", failing)
    stop = threading.Event()
    stop.set()
    source = Source({of(): Sums(1, 0, 10, 0, 3, NOW)})
    source.refresh()
    UsageWriter("a", source, 400).run(stop)
    assert UsageDay.objects.get().requests == 1


def test_the_command_adds_up_by_key(capsys):
    key, _ = create_key("Anna's notebook", ["infer"], "tester")
    today = datetime.now(UTC).date()
    usage_store.store(
        "a", 1, {of(key.prefix, day=today): Sums(2, 0, 1000, 10, 2345, NOW), of("", day=today): Sums(1, last_at=NOW)}
    )
    usage_store.store("a", 2, {of(key.prefix, day=today - timedelta(days=40)): Sums(9, 0, 9, 9, 9, NOW)})
    call_command("usage")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["key", "requests", "failed", "prompt", "tokens", "cached", "tokens", "output", "tokens"]
    assert lines[1].split() == ["Anna's", "notebook", "2", "0", "1,000", "10", "2,345"]
    assert lines[2].split()[0] == "none"
    assert lines[-1].split() == ["all", "3", "0", "1,000", "10", "2,345"]
    call_command("usage", "--by", "day", "--days", "60", "--csv")
    assert list(csv.reader(io.StringIO(capsys.readouterr().out)))[1:] == [
        [str(today - timedelta(days=40)), "9", "0", "9", "9", "9"], [str(today), "3", "0", "1000", "10", "2345"],
    ]  # fmt: skip


def test_the_page_and_its_file(admin_client):
    key, _ = create_key("Anna's notebook", ["infer"], "tester")
    usage_store.store(
        "a", 1, {of(key.prefix, "=cmd()"): Sums(2, 0, 10, 1, 3, NOW), of("gone"): Sums(1, 0, 1, 0, 1, NOW)}
    )
    page = admin_client.get(reverse("admin:management_usageday_changelist"))
    assert "Anna&#x27;s notebook" in page.content.decode()
    found = admin_client.get(reverse("admin:management_usageday_download"), {"q": key.prefix})
    assert found["content-type"].startswith("text/csv")
    lines = list(csv.reader(io.StringIO(b"".join(found.streaming_content).decode())))
    assert lines[0][:5] == ["day", "key_name", "deployment_name", "adapter", "end_user"]
    assert [line[:5] for line in lines[1:]] == [["2026-03-02", "Anna's notebook", "d", "", "'=cmd()"]]


def test_the_file_needs_the_permission_to_see_usage(client):
    client.force_login(User.objects.create_user("guest", is_staff=True))
    assert client.get(reverse("admin:management_usageday_download")).status_code == 403
    assert client.get(reverse("admin:management_usageday_changelist")).status_code == 403


@pytest.mark.parametrize("query", [{"q": "a\0b"}, {"day__year": "x"}, {"nothing": "1"}])
def test_a_file_of_a_bad_query_is_refused(admin_client, query):
    assert admin_client.get(reverse("admin:management_usageday_download"), query).status_code == 400
