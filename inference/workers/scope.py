"""Limits a request to one deployment: below a deployment's own link, and for a deployment's own key, there is no other.

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
    """Limit what this task resolves to the deployment of this public id; "" limits nothing. What is limited already stays as
    it is: no part of a request widens what its key opens.
    """
    token = _deployment.set(_deployment.get() or public_id)
    try:
        yield
    finally:
        _deployment.reset(token)


def scope_id() -> str:
    """The public id of the only deployment that this task may see; "" if it may see all."""
    return _deployment.get()


def scoped(snapshot: Snapshot) -> Snapshot:
    """The snapshot as this task may see it."""
    public_id = _deployment.get()
    return snapshot.only(public_id) if public_id else snapshot
