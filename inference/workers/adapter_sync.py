"""Keeps the workers' adapters in line with the registry: loads, pins and unloads ahead of requests."""

from __future__ import annotations

import asyncio
import time
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec
import structlog

from engine.client import EngineDead
from engine.messages import AdapterRef

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.client import EngineClient
    from inference.workers.target import Target
    from management.snapshot import AdapterEntry, DeploymentEntry, WorkerEntry

logger = structlog.get_logger(__name__)

RESEND_AFTER_S = 2.0
"""Seconds before a failed adapter command is retried."""


class AdapterSync:
    """The adapters that each connected worker has been told to have."""

    def __init__(self) -> None:
        self._sent: dict[WorkerEntry, dict[str, AdapterEntry]] = {}
        """Per worker: the adapters that it confirmed, by digest."""
        self._retry_at: dict[WorkerEntry, float] = {}
        self._syncs: dict[WorkerEntry, asyncio.Task[None]] = {}

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The syncs that were started, for shutdown."""
        return list(self._syncs.values())

    def forget(self, worker: WorkerEntry) -> None:
        """The worker is gone."""
        self._sent.pop(worker, None)
        self._retry_at.pop(worker, None)
        self._syncs.pop(worker, None)

    def start(self, target: Target, deployment: DeploymentEntry) -> None:
        """Start a task that syncs the adapters of the deployment's workers."""
        known = {adapter.digest for adapter in deployment.adapters}
        gone = {a.digest: _released(a) for a in target.entry.adapters if a.digest not in known}
        target.entry = deployment
        workers = list(target.clients)
        for worker, client in target.clients.items():
            wanted = _desired_adapters(deployment, worker, workers)
            if gone:
                sent = self._sent.setdefault(worker, {})
                sent.update({digest: adapter for digest, adapter in gone.items() if digest not in sent})
            if self._needs_sync(worker, client, wanted):
                self._syncs[worker] = asyncio.ensure_future(self._sync_adapters(worker, client, wanted, known))

    def _needs_sync(self, worker: WorkerEntry, client: EngineClient, wanted: dict[str, AdapterEntry]) -> bool:
        """Whether the worker's adapters differ from the desired state and no sync is running."""
        if client.failure is not None or client.model.embedding is not None:
            return False
        if time.monotonic() < self._retry_at.get(worker, 0.0):
            return False
        if worker in self._syncs and not self._syncs[worker].done():
            return False
        return self._sent.get(worker, {}) != wanted

    async def _sync_adapters(
        self, worker: WorkerEntry, client: EngineClient, wanted: dict[str, AdapterEntry], known: set[str]
    ) -> None:
        """Sync a worker's adapters with the registry: load and pin those of `wanted`, release those that are only `known`,
        unload the others.

        Commands that the worker cannot carry out yet (pinning while it loads, unloading while in use) are retried
        after RESEND_AFTER_S.
        """
        sent = self._sent.setdefault(worker, {})
        try:
            for digest, adapter in wanted.items():
                if sent.get(digest) == adapter:
                    continue
                ref = AdapterRef(digest, adapter.directory)
                refusal = await client.command("load", ref) if digest not in sent else None
                was_pinned = digest in sent and sent[digest].pinned
                if refusal is None and adapter.pinned != was_pinned:
                    refusal = await client.command("pin" if adapter.pinned else "unpin", ref)
                if refusal is None:
                    sent[digest] = adapter
                else:
                    self._retry_at[worker] = time.monotonic() + RESEND_AFTER_S
            for digest, adapter in list(sent.items()):
                if digest in wanted:
                    continue
                ref = AdapterRef(digest, adapter.directory)
                if adapter.pinned:
                    await client.command("unpin", ref)
                # One that requests may still name is evicted later if it is in use now.
                if await client.command("unload", ref) is None or digest in known:
                    del sent[digest]
                else:
                    self._retry_at[worker] = time.monotonic() + RESEND_AFTER_S
        except EngineDead as error:
            logger.info("adapter sync failed", worker=worker.worker_id, reason=str(error))


def placed(adapter: AdapterEntry, workers: Sequence[WorkerEntry]) -> list[WorkerEntry]:
    """The workers that load the adapter ahead of requests: all, or the `adapter.workers` with the highest hash of both. Every
    process makes the same choice, and a worker that comes or goes moves few adapters (rendezvous hashing, Thaler and
    Ravishankar 1996).
    """
    if not adapter.workers or adapter.workers >= len(workers):
        return list(workers)
    digest = adapter.digest.encode()
    ranked = sorted(workers, key=lambda worker: sha256(digest + worker.worker_id.encode()).digest(), reverse=True)
    return ranked[: adapter.workers]


def _desired_adapters(
    deployment: DeploymentEntry, worker: WorkerEntry, workers: Sequence[WorkerEntry]
) -> dict[str, AdapterEntry]:
    """The adapters that the worker should have (preload or pinned), by digest. Of several names of the same content, it is
    pinned if one is.
    """
    wanted: dict[str, AdapterEntry] = {}
    for adapter in deployment.adapters:
        if (adapter.preload or adapter.pinned) and worker in placed(adapter, workers):
            known = wanted.get(adapter.digest)
            if known is None or (adapter.pinned and not known.pinned):
                wanted[adapter.digest] = adapter
    return wanted


def _released(adapter: AdapterEntry) -> AdapterEntry:
    """The same adapter without preload and pin."""
    return msgspec.structs.replace(adapter, preload=False, pinned=False)
