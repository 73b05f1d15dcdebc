"""Arms the fault points of a web process or a reconciler, also those of the database, which the engine does not know."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import structlog
from django.db import OperationalError
from django.db.backends.signals import connection_created

from engine import faults

if TYPE_CHECKING:
    from collections.abc import Callable

    from django.db.backends.base.base import BaseDatabaseWrapper

logger = structlog.get_logger(__name__)

WRITE = "registry.write"
CHANGES = re.compile(r"\s*(insert|update|delete)\b", re.IGNORECASE)


def arm() -> None:
    """Take the faults of the environment, and say so; without DRAGOMAN_ENABLE_FAULTS say that they are left out."""
    faults.arm(os.environ)
    if faults.armed:
        logger.warning("fault points are armed", points=sorted(faults.armed))
    elif os.environ.get(faults.VARIABLE):
        logger.warning(f"{faults.VARIABLE} is ignored without {faults.SWITCH}=1")
    if WRITE in faults.armed:
        connection_created.connect(_watch)


def _watch(connection: BaseDatabaseWrapper, **_: Any) -> None:
    if _write not in connection.execute_wrappers:
        connection.execute_wrappers.append(_write)


def _write(execute: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
    """Execute a statement; a write may fail as one does whose disk is full."""
    if CHANGES.match(sql):
        try:
            faults.hit(WRITE, lambda: set(re.findall(r"\w+", sql)))
        except faults.InjectedFault as error:
            raise OperationalError(str(error)) from error
    return execute(sql, params, many, context)
