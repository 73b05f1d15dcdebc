"""The registries on a real PostgreSQL, where one answers on this machine."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys

import psycopg
import pytest

from tests.conftest import ROOT

ADMIN = os.environ.get("TEST_POSTGRESQL", "postgresql://postgres@127.0.0.1/postgres")


@pytest.fixture
def database_url():
    name = f"dragoman_{secrets.token_hex(4)}"
    try:
        admin = psycopg.connect(ADMIN, autocommit=True, connect_timeout=30)
    except psycopg.OperationalError:
        pytest.skip("no PostgreSQL on this machine")
    with admin:
        admin.execute(f"CREATE DATABASE {name}")
        yield f"{ADMIN.rpartition('/')[0]}/{name}"
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_migrations_keys_and_deployments(database_url, tmp_path):
    environment = {**os.environ, "DRAGOMAN_DATABASE_URL": database_url, "DRAGOMAN_DATA_DIR": str(tmp_path)}

    def manage(*arguments: str) -> str:
        command = [sys.executable, "-W", "ignore", "manage.py", *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    manage("migrate", "--verbosity", "0")
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
