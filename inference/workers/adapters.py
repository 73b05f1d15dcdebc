"""Loads and unloads adapters at run time, for every dialect."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from engine.client import EngineDead
from engine.messages import AdapterRef
from inference.errors import (
    AdapterExists,
    AdapterNameTaken,
    AdapterNotFound,
    AdapterRefused,
    ServingError,
    TooManyAdapters,
    Unavailable,
)

if TYPE_CHECKING:
    from inference.workers.registry import Registry
    from inference.workers.router import EngineRouter
    from inference.workers.target import Target
    from management.snapshot import SnapshotHolder

LOAD_TIMEOUT_S = 300.0


class AdapterControl:
    """Adapters of running deployments. An adapter is registered only after every worker has loaded it."""

    def __init__(self, registry: Registry, router: EngineRouter, holder: SnapshotHolder) -> None:
        self._registry, self._router, self._holder = registry, router, holder
        self._changing = asyncio.Lock()

    async def load(
        self, name: str, source: str, base: str | None, replace: bool, actor: str, max_adapters: int | None = None
    ) -> None:
        """Load the adapter on every worker, then register it for the model of the deployment `base` (None: the
        default).

        `max_adapters` limits the registered adapters; None: no limit. Raises TooManyAdapters, AdapterExists,
        AdapterNotFound, AdapterRefused, ModelNotFound or Unavailable; nothing is registered then.
        """
        async with self._changing:
            target = self._router.resolve(base)
            snapshot = self._holder.current
            if any(name in (deployment.name, deployment.model) for deployment in snapshot.deployments):
                raise AdapterNameTaken(f"The name {name!r} is a model's.")
            if not replace and any(d.adapter(name) is not None for d in snapshot.deployments):
                raise AdapterExists(name)
            if max_adapters is not None and sum(len(d.adapters) for d in snapshot.deployments) >= max_adapters:
                raise TooManyAdapters(f"There are {max_adapters} adapters already.")
            entry = await self._registry.read_adapter(name, source)
            adapter = AdapterRef(entry.digest, entry.directory)
            await self._have_read(target, adapter)
            try:
                await self._registry.register_adapter(name, target.entry.model, entry.directory, actor)
            except ServingError:
                await self._forget(target, adapter)
                raise

    async def unload(self, name: str, actor: str) -> None:
        """Unload: new requests no longer find the adapter; running ones finish, then workers free it. Raises
        AdapterNotFound.
        """
        async with self._changing:
            if not any(d.adapter(name) is not None for d in self._holder.current.deployments):
                raise AdapterNotFound(name)
            await self._registry.remove_adapter(name, actor)

    async def _forget(self, target: Target, adapter: AdapterRef) -> None:
        """Unload from the workers, unless another registered name has the same digest."""
        if any(a.digest == adapter.digest for d in self._holder.current.deployments for a in d.adapters):
            return
        clients = [client for client in target.clients.values() if client.usable]
        await asyncio.gather(*(client.command("unload", adapter) for client in clients), return_exceptions=True)

    async def _have_read(self, target: Target, adapter: AdapterRef) -> None:
        clients = [client for client in target.clients.values() if client.usable]
        if not clients:
            raise Unavailable("The model is not available at the moment; its workers are starting or restarting.")
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                replies = await asyncio.gather(*(client.command("load", adapter) for client in clients))
        except (EngineDead, TimeoutError) as error:
            raise Unavailable("A worker did not read the adapter in time.") from error
        refusal = next((reply for reply in replies if reply is not None), None)
        if refusal is not None:
            raise AdapterRefused(refusal.words, refusal)
