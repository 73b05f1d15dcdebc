"""The live status of the admin: a WebSocket that sends deployments and workers once a second, for staff users."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog
from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncJsonWebsocketConsumer
from django.contrib.auth.models import User
from django.db import Error

from management import live
from management.database_errors import one_line
from management.models import Deployment, Worker
from management.snapshot import WorkerRole

logger = structlog.get_logger(__name__)

INTERVAL_S = 1.0
NOT_STAFF = 4403
ROLES = {WorkerRole.BOTH: "Both", WorkerRole.PREFILL: "Prefill", WorkerRole.DECODE: "Decode"}


class StatusConsumer(AsyncJsonWebsocketConsumer):
    """The connection of one open admin page."""

    sending: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Accept staff users; close the others with code 4403."""
        user = self.scope["user"]
        if not (user.is_authenticated and user.is_staff):
            await self.close(NOT_STAFF)
            return
        await self.accept()
        self.sending = asyncio.create_task(self._send_forever())

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None, **kwargs: Any) -> None:
        """Leave unread what a page sends: it has nothing to say."""

    async def disconnect(self, code: int) -> None:
        """Stop sending."""
        if self.sending is not None:
            self.sending.cancel()
            await asyncio.gather(self.sending, return_exceptions=True)

    async def _send_forever(self) -> None:
        while True:
            try:
                user = await database_sync_to_async(self._staff)()
                if user is None:
                    await self.close(NOT_STAFF)
                    return
                await self.send_json(await database_sync_to_async(status)(user))
            except Error as error:
                logger.warning("live status not readable", error=one_line(error))
            await asyncio.sleep(INTERVAL_S)

    def _staff(self) -> User | None:
        """The user, read anew; None if they are no longer staff or logged in: a page may stay open for days."""
        session = self.scope.get("session")
        if session is not None and session.session_key and not session.exists(session.session_key):
            return None
        return User.objects.filter(pk=self.scope["user"].pk, is_active=True, is_staff=True).first()


def status(user: User) -> dict[str, Any]:
    """Deployments, and live workers with their engines' gauges, as JSON values; what the user may not look at is left out."""
    return {
        "deployments": _deployments() if _may_look(user, "deployment") else [],
        "workers": _workers() if _may_look(user, "worker") else [],
    }


def _may_look(user: User, rows: str) -> bool:
    return user.has_perm(f"management.view_{rows}") or user.has_perm(f"management.change_{rows}")


def _workers() -> list[dict[str, Any]]:
    stats = live.stats()
    return [
        {
            "worker": worker.worker_id,
            "epoch": worker.epoch,
            "role": ROLES[worker.deployment.role_of(worker.index)],
            "state": worker.get_state_display(),
            "running": s.running if (s := stats.get(worker.worker_id)) else None,
            "waiting": s.waiting if s else None,
            "kv_usage_percent": round(100 * s.blocks_used / max(1, s.blocks_total), 1) if s else None,
            "generated_tokens": s.generation_tokens if s else None,
        }
        for worker in Worker.objects.filter(state__in=Worker.LIVE).select_related("deployment")
    ]


def _deployments() -> list[dict[str, Any]]:
    return [
        {"deployment": row.name, "state": row.get_state_display(), "replicas": row.replicas, "reason": row.reason}
        for row in Deployment.objects.all()
    ]
