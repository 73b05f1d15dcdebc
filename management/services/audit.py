"""Writes audit events."""

from __future__ import annotations

from typing import Any

from management import changes
from management.models import AuditEvent


def record(actor: str, action: str, target: str, **details: Any) -> None:
    """Write an audit event, and tell other processes of the change. Call it inside the transaction of the change. `details` must hold no secrets."""
    AuditEvent.objects.create(actor=actor, action=action, target=target, details=details)
    changes.announce()
