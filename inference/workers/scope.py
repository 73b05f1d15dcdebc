"""Limits a request to one deployment: below a deployment's own link there is no other.

The scope belongs to the task that handles the request, so that nothing between the route and the router has to pass it on.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from management.snapshot import Snapshot

_deployment: ContextVar[str] = ContextVar("deployment", default="")


@contextmanager
def within(public_id: str) -> Iterator[None]:
    """Limit what this task resolves to the deployment of this public id."""
    token = _deployment.set(public_id)
    try:
        yield
    finally:
        _deployment.reset(token)


def is_scoped() -> bool:
    """Whether this task is limited to one deployment."""
    return bool(_deployment.get())


def scoped(snapshot: Snapshot) -> Snapshot:
    """The snapshot as this task may see it."""
    public_id = _deployment.get()
    return snapshot.only(public_id) if public_id else snapshot
