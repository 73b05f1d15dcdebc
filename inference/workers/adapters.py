"""Loads and unloads adapters at run time, for every dialect."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from engine.adapters.failures import AdapterCode, AdapterFailure
from engine.adapters.files import CONFIG
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
from inference.workers.adapter_sync import placed
from inference.workers.scope import scoped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine.client import EngineClient
    from inference.workers.registry import Kept, Registry
    from inference.workers.router import EngineRouter
    from inference.workers.target import Target
    from management.snapshot import AdapterEntry, SnapshotHolder

LOAD_TIMEOUT_S = 300.0
UNDO_TIMEOUT_S = 10.0


class AdapterControl:
    """Adapters of running deployments. An adapter is registered only after every worker has loaded it."""

    def __init__(self, registry: Registry, router: EngineRouter, holder: SnapshotHolder) -> None:
        self._registry, self._router, self._holder = registry, router, holder
        self._changing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Per deployment: its adapters change one after the other, and no other's wait for a worker that wakes or
        hangs.
        """

    async def load(
        self,
        name: str,
        source: str,
        base: str | None,
        replace: bool,
        actor: str,
        max_adapters: int | None = None,
        *,
        preload: bool | None = None,
        pinned: bool | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        """Load the adapter on every worker of the deployment `base` (None: the default), then register it for that. A
        sleeping deployment is woken for it, and one that was never ready is waited for. With `preload` false and
        `pinned` not true, no worker loads it before a request does.

        `max_adapters` limits the registered adapters; None: no limit. Raises TooManyAdapters, AdapterExists,
        AdapterNotFound, AdapterRefused, ModelNotFound or Unavailable; nothing is registered then.
        """

        async def known() -> Target:
            return self._router.resolve(base)

        deployment = (await self._router.when_known(actor, known)).entry.name
        async with self._changing[deployment]:
            target = self._router.resolve(deployment)
            snapshot = self._holder.current
            if any(name in (d.name, d.served_name, d.model) for d in snapshot.deployments):
                raise AdapterNameTaken(f"The name {name!r} is a model's.")
            if not replace and target.entry.adapter(name) is not None:
                raise AdapterExists(name)
            registered = {(d.name, a.name) for d in snapshot.deployments for a in d.adapters}
            if max_adapters is not None and len(registered) >= max_adapters:
                raise TooManyAdapters(f"There are {max_adapters} adapters already.")
            adapter = await self._registry.read_adapter(name, source, options)
            if adapter.rank > target.info.max_adapter_rank:
                raise AdapterRefused(*_rank_refusal(adapter.rank, target.info.max_adapter_rank))
            loads = preload is not False or pinned is True
            if loads:
                await self._have_read(target, adapter, pinned is True)
            kept: Kept = {"preload": preload, "pinned": pinned, "options": options}
            try:
                await self._registry.register_adapter(adapter, target.entry.name, actor, replace=replace, **kept)
            except ServingError:
                if loads:
                    await self._forget(target, adapter, pinned is True)
                raise

    async def update(
        self,
        name: str,
        base: str | None,
        actor: str,
        *,
        preload: bool | None = None,
        pinned: bool | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        """Change how an adapter is kept; None keeps the present value. What is to be loaded or pinned is, on every worker,
        before this is recorded. Raises AdapterNotFound, AdapterRefused, ModelNotFound or Unavailable; nothing has changed
        then.
        """
        deployment = self._router.resolve(base).entry.name
        async with self._changing[deployment]:
            target = self._router.resolve(deployment)
            adapter = target.entry.adapter(name)
            if adapter is None:
                raise AdapterNotFound(name)
            pins = pinned is True and not adapter.pinned
            reads = pins or (preload is True and not adapter.preload)
            if reads:
                await self._have_read(target, adapter, pins)
            kept: Kept = {"preload": preload, "pinned": pinned, "options": options}
            try:
                await self._registry.change_adapter(name, target.entry.name, actor, **kept)
            except ServingError:
                if reads:
                    await self._forget(target, adapter, pins)
                raise

    async def unload(self, name: str, actor: str, base: str | None = None) -> None:
        """Unload an adapter of the deployment `base` (None: of the one that the adapter's bare name means): new
        requests no longer find it; running ones finish, then workers free it. Other deployments' adapters of this name
        stay. Raises ModelNotFound, or AdapterNotFound if there is none, or another call has removed or replaced it
        meanwhile.
        """
        if base is None:
            found = scoped(self._holder.current).resolve(name)
            deployment, adapter = ("", None) if found is None else (found.deployment.name, found.adapter)
        else:
            entry = self._router.resolve(base).entry
            deployment, adapter = entry.name, entry.adapter(name)
        if adapter is None:
            raise AdapterNotFound(name)
        async with self._changing[deployment]:
            current = self._registered(adapter.name, deployment)
            # What was registered under the name while this call waited is not what it was asked to remove.
            if current is None or (current.digest, current.created) != (adapter.digest, adapter.created):
                raise AdapterNotFound(name)
            await self._registry.remove_adapter(adapter.name, actor, deployment)

    def _registered(self, name: str, deployment: str) -> AdapterEntry | None:
        """The adapter of this name that the deployment serves now."""
        entries = self._holder.current.deployments
        return next((entry.adapter(name) for entry in entries if entry.name == deployment), None)

    def failures(self, base: str | None) -> dict[str, AdapterFailure]:
        """Why workers of the deployment `base` could not load adapters when they were last needed, by digest. Raises
        ModelNotFound or Unavailable.
        """
        found: dict[str, AdapterFailure] = {}
        for client in self._router.resolve(base).clients.values():
            found |= client.stats.failed_adapters
        return found

    async def _forget(self, target: Target, adapter: AdapterEntry, pinned: bool) -> None:
        """Undo on the workers what was done for an adapter that is not registered after all: unpin and unload it, as far as
        no registered name of the same digest wants it so.
        """
        others = [a for d in self._holder.current.deployments for a in d.adapters if a.digest == adapter.digest]
        ref = AdapterRef(adapter.digest, adapter.directory)
        clients = [client for client in target.clients.values() if client.usable]
        if pinned and not any(other.pinned for other in others):
            await asyncio.gather(*(_command(client, "unpin", ref) for client in clients))
        if not others:
            await asyncio.gather(*(_command(client, "unload", ref) for client in clients))

    async def _have_read(self, target: Target, adapter: AdapterEntry, pin: bool) -> None:
        """Load the adapter on every worker that should have it, and pin it there; an error or a cancellation leaves none of it."""
        if target.asleep:
            await self._router.hold(target, "", LOAD_TIMEOUT_S)
            target = self._router.resolve(target.entry.name)
        workers = placed(adapter, [worker for worker, client in target.clients.items() if client.usable])
        clients = [target.clients[worker] for worker in workers]
        if not clients:
            raise Unavailable("The model is not available at the moment; its workers are starting or restarting.")
        ref = AdapterRef(adapter.digest, adapter.directory)
        try:
            refusal = await self._all(clients, "load", ref)
            if refusal is None and pin:
                refusal = await self._all(clients, "pin", ref)
            if refusal is not None:
                raise AdapterRefused(refusal.words, refusal)
        except (ServingError, asyncio.CancelledError):  # or the request that asked for it ends
            await self._forget(target, adapter, pin)
            raise

    async def _all(
        self, clients: list[EngineClient], action: Literal["load", "pin"], ref: AdapterRef
    ) -> AdapterFailure | None:
        """Send the command to all; the first refusal, if there is one. Raises Unavailable."""
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                replies = await asyncio.gather(*(client.command(action, ref) for client in clients))
        except (EngineDead, TimeoutError) as error:
            raise Unavailable("A worker did not read the adapter in time.") from error
        return next((reply for reply in replies if reply is not None), None)


async def _command(client: EngineClient, action: Literal["unpin", "unload"], ref: AdapterRef) -> None:
    """Undo on a worker what it may have done; a dead worker has nothing to undo, and a busy one evicts the adapter later."""
    with suppress(EngineDead, TimeoutError):
        async with asyncio.timeout(UNDO_TIMEOUT_S):
            await client.command(action, ref)


def _rank_refusal(rank: int, limit: int) -> tuple[str, AdapterFailure]:
    failure = AdapterFailure(AdapterCode.RANK, {"tensor": CONFIG, "rank": rank, "limit": limit})
    if not limit:
        failure = AdapterFailure(AdapterCode.NO_ADAPTERS)
    return failure.words, failure
