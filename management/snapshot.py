"""The registries as the request path reads them: immutable, in memory, built elsewhere. No ORM is imported here."""

from __future__ import annotations

import hashlib
import hmac
import threading
import time
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable


class WorkerEntry(msgspec.Struct, frozen=True):
    """A worker that can be connected to."""

    worker_id: str
    epoch: int
    address: str


class AdapterEntry(msgspec.Struct, frozen=True):
    """An adapter of a deployment's model. `created` is Unix seconds. Workers read it ahead if `preload` or `pinned`, and
    keep it in its slot if `pinned`.
    """

    name: str
    digest: str
    directory: str
    created: int
    preload: bool = False
    pinned: bool = False


class DeploymentEntry(msgspec.Struct, frozen=True):
    """A deployment that should be serving. `created` is Unix seconds."""

    name: str
    model: str
    version: int
    created: int
    is_default: bool
    workers: tuple[WorkerEntry, ...]
    adapters: tuple[AdapterEntry, ...] = ()

    def adapter(self, name: str) -> AdapterEntry | None:
        """The adapter of that name."""
        return next((adapter for adapter in self.adapters if adapter.name == name), None)


class Resolved(msgspec.Struct, frozen=True):
    """What a client's model name means."""

    deployment: DeploymentEntry
    adapter: AdapterEntry | None = None


class ApiKeyEntry(msgspec.Struct, frozen=True):
    """One usable key: its public prefix, the hash of the whole key, and what it may do. `expires` is Unix seconds."""

    prefix: str
    name: str
    hashed_key: str
    scopes: frozenset[str]
    expires: float | None


class Snapshot(msgspec.Struct, frozen=True):
    """All that the request path knows of the registries, as of one moment."""

    deployments: tuple[DeploymentEntry, ...] = ()
    keys: dict[str, ApiKeyEntry] = {}

    def find_key(self, key: str) -> ApiKeyEntry | None:
        """The entry of a key, if it is known and not expired. Takes as long for an unknown prefix."""
        entry = self.keys.get(key.partition(".")[0])
        stored = entry.hashed_key if entry else hash_key("")
        same = hmac.compare_digest(hash_key(key), stored)
        if entry is None or not same or (entry.expires is not None and entry.expires <= time.time()):
            return None
        return entry

    def resolve(self, name: str | None) -> Resolved | None:
        """What a client means: the default for "tgi", "dummy" and "", else a deployment's name, a model's name, an
        adapter's name if only one deployment has it, or `deployment:adapter`, in this order.
        """
        if not name or name in ("tgi", "dummy"):
            defaults = [d for d in self.deployments if d.is_default] or list(self.deployments)
            return Resolved(defaults[0]) if defaults else None
        found = [d for d in self.deployments if d.name == name] or [d for d in self.deployments if d.model == name]
        if found:
            return Resolved(found[0])
        having = [(d, adapter) for d in self.deployments if (adapter := d.adapter(name)) is not None]
        if not having:
            first, _, second = name.rpartition(":")
            having = [(d, a) for d in self.deployments if d.name == first and (a := d.adapter(second)) is not None]
        return Resolved(*having[0]) if len(having) == 1 else None


def hash_key(key: str) -> str:
    """As djangorestframework-api-key stores it. Keys are random, so a fast hash is safe."""
    return "sha512$$" + hashlib.sha512(key.encode()).hexdigest()


class SnapshotHolder:
    """The current snapshot, and who wants to hear of the next one."""

    def __init__(self) -> None:
        self.current = Snapshot()
        self._building = threading.Lock()
        self._listeners: list[Callable[[Snapshot], object]] = []

    def subscribe(self, listener: Callable[[Snapshot], object]) -> None:
        """Call `listener` with every new snapshot, from the thread that publishes it."""
        self._listeners.append(listener)

    def refresh(self, build: Callable[[], Snapshot]) -> None:
        """Build and publish, one at a time, so that what is older never comes after what is newer."""
        with self._building:
            self.publish(build())

    def publish(self, snapshot: Snapshot) -> None:
        """Replace the snapshot; tells the listeners only when something changed."""
        if snapshot != self.current:
            self.current = snapshot
            for listener in self._listeners:
                listener(snapshot)
