"""Writes audit events."""

from __future__ import annotations

from typing import Any

from management.models import AuditEvent


def record(actor: str, action: str, target: str, **details: Any) -> None:
    """Write an audit event. Call it inside the transaction of the change. `details` must hold no secrets."""
    AuditEvent.objects.create(actor=actor, action=action, target=target, details=details)
