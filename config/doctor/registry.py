"""The checks of the registry: the database, its tables, and the files of models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from django.db import DEFAULT_DB_ALIAS, Error, connections
from django.db.migrations.executor import MigrationExecutor

from config.doctor.finding import Finding, Level, error, ok, warning
from config.installation import DATABASE
from management.database_errors import one_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from django.db.backends.base.base import BaseDatabaseWrapper

    from config.options import Options
    from inference.planes.declaration import Setup


def check_database(options: Options) -> tuple[list[Finding], bool]:
    """Whether the database can be used and has this version's tables; and whether models are registered in it."""
    connection = connections[DEFAULT_DB_ALIAS]
    try:
        executor = MigrationExecutor(connection)
        plan = executor.migration_plan(executor.loader.graph.leaf_nodes())
        newer = set(executor.loader.applied_migrations) - set(executor.loader.disk_migrations)
        fixed = _takes_no_changes(connection)
    except Error as problem:
        place = "DRAGOMAN_DATABASE_URL" if options.database_url else options.data_dir / DATABASE
        return [error("database", f"{place}: the database cannot be used: {one_line(problem)}")], False
    if fixed:
        hint = "name the primary server, and see its setting default_transaction_read_only"
        return [error("database", "DRAGOMAN_DATABASE_URL: the database can be read, but takes no changes", hint)], True
    if newer:
        hint = "install that version, or restore a backup of this one's"
        return [error("database", f"{len(newer)} migrations are of another version of the server", hint)], False
    if plan:
        hint = "`serve` and `reconcile` apply them when they start; before `web`, run `migrate`"
        return [warning("database", f"{len(plan)} migrations are not applied", hint)], False
    return [ok("database", f"{connection.vendor}, all migrations are applied")], True


def _takes_no_changes(connection: BaseDatabaseWrapper) -> bool:
    """Whether it is a standby of PostgreSQL's, or one that is switched to reading only."""
    if connection.vendor != "postgresql":
        return False
    with connection.cursor() as cursor:
        cursor.execute("SHOW transaction_read_only")
        return bool(cursor.fetchone()[0] == "on")


def check_secrets(options: Options) -> list[Finding]:
    """Whether the secrets that are stored in the database can be decrypted here, and will be on every host."""
    from management.services.secrets import count_unreadable

    findings = []
    if options.worker_host and not options.secrets_key.get_secret_value():
        hint = "give all hosts the same key, by DRAGOMAN_SECRETS_KEY or a file"
        findings.append(warning("secrets", "DRAGOMAN_SECRETS_KEY is not set: each host makes a key of its own", hint))
    unreadable, stored = count_unreadable()
    if unreadable:
        text = f"{unreadable} of {stored} stored secrets were encrypted with another DRAGOMAN_SECRETS_KEY"
        findings.append(error("secrets", text, "set the key of that time, alone or after the new one"))
    return findings or [ok("secrets", f"{stored} stored, all can be decrypted")]


def check_models(options: Options, setups: Iterable[Setup], *, registered: bool) -> list[Finding]:
    """Whether the files of the models to serve can be read, those of the `registered` deployments included."""
    wanted = next((setup.deployment.source for setup in setups if setup.deployment is not None), options.model)
    sources = {wanted: Level.ERROR}
    if registered:
        from management.models import Deployment

        try:
            for row in Deployment.objects.filter(deleted=False).select_related("version"):
                sources.setdefault(row.version.source, Level.WARNING if row.stopped else Level.ERROR)
        except Error as problem:
            return [error("models", f"the registry cannot be read: {one_line(problem)}")]
    return [check_model(source, level) for source, level in sources.items()]


def check_model(source: str, level: Level) -> Finding:
    """Whether a directory holds readable weights as safetensors; `level` is that of one that does not."""
    from engine.models.files import ModelError, check_weights, read_json

    path = Path(source).expanduser()
    if not path.is_dir():
        if source.startswith((".", "/", "~")) or source.count("/") > 1:
            return Finding("models", level, f"{source}: the directory does not exist")
        return ok("models", f"{source}: fetched from the hub when a worker starts")
    try:
        read_json(path / "config.json")
        check_weights(path)
    except (ModelError, OSError) as problem:
        return Finding("models", level, f"{source}: {problem}")
    return ok("models", f"{source}: its files can be read")
