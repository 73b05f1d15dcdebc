"""The registries on a real PostgreSQL."""

from __future__ import annotations

import os
import subprocess
import sys

import psycopg
import pytest

from tests.conftest import DEMO, ROOT
from tests.waiting import wait_until

pytestmark = pytest.mark.full


@pytest.fixture
def database_url(postgresql):
    with postgresql.database() as url:
        yield url


@pytest.fixture
def begin(database_url, tmp_path):
    """Starts a management command on the database, whose tables are there."""
    environment = {**os.environ, "DRAGOMAN_DATABASE_URL": database_url, "DRAGOMAN_DATA_DIR": str(tmp_path)}

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "ignore", "manage.py", *arguments]
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    printed(start("migrate", "--verbosity", "0"))
    return start


def printed(command: subprocess.Popen[str]) -> str:
    """What a command prints, when it has ended well."""
    output, errors = command.communicate(timeout=90)
    assert command.returncode == 0, errors
    return output.strip()


def test_keys_of_before_they_had_ids(begin):
    def manage(*arguments: str) -> str:
        return printed(begin(*arguments))

    old = manage("createkey", "old")
    manage("deploy", str(DEMO), "--name", "demo")
    own = manage("createkey", "own", "--deployment", "demo")
    manage("migrate", "management", "0016", "--verbosity", "0")
    manage("migrate", "--verbosity", "0")
    program = (
        "from management.models import ApiKey;"
        f"print([ApiKey.objects.get_from_key(text).pk > 0 for text in ('{old}', '{own}')])"
    )
    assert manage("shell", "--no-imports", "-v", "0", "-c", program).splitlines()[-1] == "[True, True]"


def test_migrations_keys_and_deployments(begin):
    def manage(*arguments: str) -> str:
        return printed(begin(*arguments))

    key = manage("createkey", "my-client")
    program = (
        "from management.services.models import register_model;"
        "from management.services.deployments import create_deployment, start_deployment;"
        "from management.services.snapshots import build_snapshot, read_registries;"
        "d = create_deployment('demo', register_model('demo', '/models/demo', 'tester'), 'tester');"
        "start_deployment(d, 'tester');"
        f"s = build_snapshot(read_registries()); print(s.resolve(None).deployment.name, s.find_key('{key}').name)"
    )
    assert manage("shell", "--no-imports", "-v", "0", "-c", program).splitlines()[-1] == "demo my-client"
    program = (
        "from django.db import connection;"
        "ask = lambda: connection.cursor().execute('SHOW statement_timeout').fetchone()[0];"
        "editor = connection.schema_editor();"
        "editor.__enter__(); within = ask(), connection.patient; editor.__exit__(None, None, None);"
        "print(*within, ask(), connection.patient)"
    )
    # migrations have time, others have not
    assert manage("shell", "--no-imports", "-v", "0", "-c", program).splitlines()[-1] == "0 True 5s False"
    assert manage("makemigrations", "--check", "--dry-run") == "No changes detected"


def test_a_version_that_is_registered_while_its_adapter_is_removed_is_removed_as_well(begin, database_url):
    """The removal waits for a registration that has begun, and sees what it did."""
    shell = ("shell", "--no-imports", "-v", "0", "-c")
    program = (
        "from management.models import Adapter, AdapterVersion;"
        "from management.services.deployments import create_deployment;"
        "from management.services.models import register_model;"
        "d = create_deployment('demo', register_model('demo', '/models/demo', 'tester'), 'tester');"
        "a = Adapter.objects.create(name='taught', deployment=d);"
        "AdapterVersion.objects.create(adapter=a, number=1, digest='a' * 64, rank=4, source='x', directory='/x')"
    )
    printed(begin(*shell, program))
    program = (
        "from management.models import Adapter, AdapterVersion;"
        "from management.services.adapters import remove_adapter;"
        "remove_adapter(Adapter.objects.get(), 'tester');"
        "print(Adapter.objects.count(), AdapterVersion.objects.count())"
    )
    with psycopg.connect(database_url) as registration, psycopg.connect(database_url, autocommit=True) as watcher:
        (row,) = registration.execute("SELECT id FROM management_adapter FOR UPDATE").fetchone()
        registration.execute(
            "INSERT INTO management_adapterversion (adapter_id, number, digest, rank, source, directory, is_current, created_at)"
            " VALUES (%s, 2, %s, 4, 'y', '/y', false, now())",
            (row, "b" * 64),
        )
        removal = begin(*shell, program)
        waits = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        wait_until(lambda: removal.poll() is not None or watcher.execute(waits).fetchone() is not None, 60)
        registration.commit()
    assert printed(removal) == "0 0"


AT_ONCE = """
from concurrent.futures import ThreadPoolExecutor
from django.db import connection, transaction
from management.models import Deployment, Model, ModelVersion
from management.services.deployments import create_deployment, make_default_version
from management.services.errors import RegistryError
from management.services.models import register_model, remove_model
from tests.waiting import wait_until

model = register_model("demo", "/models/demo", "tester")
WAITS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


def waiting():
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_clear_snapshot()")  # a transaction sees the activity as it was first
        return cursor.execute(WAITS).fetchone()[0]


def run_while_locked(row, *calls):
    with ThreadPoolExecutor(2) as threads:
        with transaction.atomic():
            type(row).objects.select_for_update().get(pk=row.pk)
            changes = []
            for call, *arguments in calls:
                changes.append(threads.submit(call, *arguments, "tester"))
                wait_until(lambda: waiting() == len(changes), 60)
        return [change.result() for change in changes]


"""
DEFAULTS = """
first, second = [create_deployment(f"demo-{n}", model, "tester", served_name="demo", label=n) for n in "12"]
run_while_locked(first, (make_default_version, first), (make_default_version, second))
print(*Deployment.objects.filter(is_default_version=True).values_list("label", flat=True))
"""
SOURCES = """
run_while_locked(model, *((register_model, "demo", source) for source in ("/a", "/b")))
print(*sorted(ModelVersion.objects.values_list("number", "is_default")))
"""

REMOVAL = """
def removed():
    try:
        remove_model(model.model, "tester")
    except RegistryError as refusal:
        return str(refusal)

with ThreadPoolExecutor(1) as threads:
    with transaction.atomic():
        create_deployment("demo", model, "tester")
        Model.objects.select_for_update().get(pk=model.model_id)
        removal = threads.submit(removed)
        wait_until(lambda: waiting() == 1, 60)
    print(removal.result(), Deployment.objects.count())
"""


UPDATE = """
from management.api.scalegenai import changes

row = create_deployment("demo", model, "tester")
with ThreadPoolExecutor(1) as threads:
    with transaction.atomic():
        Model.objects.select_for_update().get(pk=model.model_id)
        update = threads.submit(changes.update, row.public_id, {"autoscaling_config": {"max_workers": 3}}, "tester")
        wait_until(lambda: update.done() or waiting(), 60)
        print(update.done())
    print(update.result())
"""


def test_two_versions_that_become_the_default_at_once_wait_for_each_other(begin):
    """Neither is refused, as the database would end one of two that lock the same rows in different orders."""
    assert printed(begin("shell", "--no-imports", "-v", "0", "-c", AT_ONCE + DEFAULTS)).splitlines()[-1] == "2"


def test_two_sources_of_a_model_at_once_are_two_versions(begin):
    told = printed(begin("shell", "--no-imports", "-v", "0", "-c", AT_ONCE + SOURCES)).splitlines()[-1]
    assert told == "(1, False) (2, False) (3, True)"


def test_a_deployment_that_is_created_while_its_model_is_removed_stays(begin):
    """The removal waits for the creation, and is refused."""
    told = printed(begin("shell", "--no-imports", "-v", "0", "-c", AT_ONCE + REMOVAL)).splitlines()[-1]
    assert told == "demo has deployments; remove them first 1"


def test_an_update_of_a_deployment_does_not_wait_for_its_model(begin):
    """Who removes a model locks it first, then its deployments: one that did the reverse would be ended by the database."""
    told = printed(begin("shell", "--no-imports", "-v", "0", "-c", AT_ONCE + UPDATE)).splitlines()
    assert told[-2:] == ["True", "None"]


USAGE = """
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from management import usage_store
from management.models import UsageDay
from management.usage import COUNTED, Sums, UsageOf

now = datetime.now(UTC)
old = now.date() - timedelta(days=31)
names = [f"k{n}" for n in range(700)]

def store(process):
    order = names if process % 2 else names[::-1]
    for day, user in ((now.date(), ""), (old, "anna"), (old, "bob")):
        usage_store.store(f"p{process}{day}{user}", 1, {UsageOf(day, k, "d", "", user): Sums(1, 0, 2, 0, 3, now) for k in order})

with ThreadPoolExecutor(4) as threads:
    list(threads.map(store, range(4)))
    list(threads.map(lambda _: usage_store.forget(now.date(), 400), range(4)))
rows = list(UsageDay.objects.values_list("day", "end_user", *COUNTED))
print(len(rows), *sorted({(str(day == old), user, *counts) for day, user, *counts in rows}))
"""


def test_usage_of_several_processes_at_once(begin):
    """Each batch is added once, none waits for another for ever, and names are forgotten once."""
    told = printed(begin("shell", "--no-imports", "-v", "0", "-c", USAGE)).splitlines()[-1]
    assert told == "1400 ('False', '', 4, 0, 8, 0, 12) ('True', '', 8, 0, 16, 0, 24)"
