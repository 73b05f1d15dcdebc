"""The snapshot: an immutable in-memory copy of the registries for the request path. It imports no ORM."""

from __future__ import annotations

import hashlib
import hmac
import threading
import time
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class WorkerRole(StrEnum):
    """Which part of a sequence a worker is meant for."""

    BOTH = "both"
    PREFILL = "prefill"
    """It computes prompts and hands their blocks to workers that decode."""
    DECODE = "decode"


class WorkerEntry(msgspec.Struct, frozen=True):
    """A ready worker and the socket on which it listens. `model_version` is the registry's key of the version that it
    serves: versions of different models have different keys. `numerics` names the engine options that change outputs.
    """

    worker_id: str
    epoch: int
    address: str
    model_version: int = 0
    numerics: str = ""
    role: WorkerRole = WorkerRole.BOTH

    @property
    def kind(self) -> tuple[int, str]:
        """Workers of one kind continue each other's sequences."""
        return self.model_version, self.numerics


class AdapterEntry(msgspec.Struct, frozen=True):
    """An adapter of a deployment. `created` is in Unix seconds. Workers load it before the first request if
    `preload` or `pinned`, and never evict it from its slot if `pinned`; `workers` of them do so, 0 means all.

    `source` is the directory that its registration named; `options` are what the client gave besides.
    """

    name: str
    digest: str
    directory: str
    created: int
    preload: bool = False
    pinned: bool = False
    rank: int = 0
    source: str = ""
    workers: int = 0
    options: tuple[tuple[str, str], ...] = ()


class Availability(StrEnum):
    """What a request may expect of a deployment without a ready worker."""

    COMING = "coming"
    """Workers are ready or will be: a request may wait for them."""
    ASLEEP = "asleep"
    """It has no workers until a request wakes it."""
    FAILED = "failed"
    """No worker will come until a person acts."""
    TOO_DEAR = "too_dear"
    """It has no worker, and its limit of the price allows none."""


class DeploymentEntry(msgspec.Struct, frozen=True):
    """A deployment that should serve, with or without workers. `created` is in Unix seconds.

    `info` describes its last ready worker, as msgpack of `ModelInfo`; None if there never was one. `start_timeout_s`: how
    long a request may wait for a worker. `chat_template` replaces the model's own. `shares_with`: the deployment that
    serves its requests while it has no ready worker. Deployments of one `served_name` (empty: the own name) are its versions,
    told apart by their `label`.
    """

    name: str
    model: str
    version: int
    created: int
    is_default: bool
    workers: tuple[WorkerEntry, ...]
    adapters: tuple[AdapterEntry, ...] = ()
    public_id: str = ""
    title: str = ""
    availability: Availability = Availability.COMING
    info: bytes | None = None
    start_timeout_s: float = 1200.0
    chat_template: str = ""
    shares_with: str = ""
    served_name: str = ""
    label: str = ""
    is_default_version: bool = True

    def answers_to(self, name: str) -> bool:
        """Whether requests for this name are this deployment's: its served name if it is the default version, its own, or
        `SERVED_NAME/LABEL`.
        """
        served = self.served_name or self.name
        if name == served:
            return self.is_default_version
        return name in (self.name, f"{served}/{self.label}")

    def adapter(self, name: str) -> AdapterEntry | None:
        """The adapter of this name, or None."""
        return next((adapter for adapter in self.adapters if adapter.name == name), None)


class Resolved(msgspec.Struct, frozen=True):
    """The deployment, and the adapter if any, for a client's model name."""

    deployment: DeploymentEntry
    adapter: AdapterEntry | None = None


class KeyLimits(msgspec.Struct, frozen=True):
    """A key's weight among others, above 0, and how much it may ask for; 0 is no limit."""

    weight: float = 1.0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    tokens_per_day: int = 0

    @property
    def limited(self) -> bool:
        """Whether there is any limit."""
        return bool(self.requests_per_minute or self.tokens_per_minute or self.tokens_per_day)


class ApiKeyEntry(msgspec.Struct, frozen=True):
    """A valid API key: its public prefix, the hash of the whole key, and its scopes. `expires` is in Unix seconds."""

    prefix: str
    name: str
    hashed_key: str
    scopes: frozenset[str]
    expires: float | None
    deployment: str = ""
    """The public id of the only deployment that the key opens; empty: all."""
    limits: KeyLimits = KeyLimits()


class Snapshot(msgspec.Struct, frozen=True):
    """The registries at one moment, as the request path needs them. `keys` are by prefix."""

    deployments: tuple[DeploymentEntry, ...] = ()
    keys: dict[str, ApiKeyEntry] = {}
    stopped: frozenset[str] = frozenset()
    """Public ids of deployments that people have stopped; nothing wakes them."""

    def find_key(self, key: str) -> ApiKeyEntry | None:
        """The entry of a key, or None if it is unknown or expired. Constant time, also for an unknown prefix."""
        entry = self.keys.get(key.partition(".")[0])
        stored = entry.hashed_key if entry else hash_key("")
        same = hmac.compare_digest(hash_key(key), stored)
        if entry is None or not same or (entry.expires is not None and entry.expires <= time.time()):
            return None
        return entry

    def only(self, public_id: str) -> Snapshot:
        """The snapshot with this deployment alone, which also serves requests that name no model."""
        found = [
            msgspec.structs.replace(d, is_default=True, is_default_version=True)
            for d in self.deployments
            if d.public_id == public_id
        ]
        return Snapshot(tuple(found), self.keys)

    def resolve(self, name: str | None) -> Resolved | None:
        """Resolve a client's model name, or return None. "tgi", "dummy" and "" mean the default deployment; otherwise
        the served name of versions (the default one), the name of a deployment, of a model, an adapter, a deployment's
        title, or `deployment:adapter`, in this order.

        Of several deployments that have a model, an adapter or a title of this name, it is the default deployment's,
        else that of the one created first among those that are ready, or among all: one that is created later takes no
        name away.
        """
        if not name or name in ("tgi", "dummy"):
            return self._first(self.deployments, None)
        named = next((d for d in self.deployments if d.answers_to(name)), None)
        if named is not None:
            return Resolved(named)
        of_model = [d for d in self.deployments if d.model == name and d.is_default_version]
        with_adapter = [d for d in self.deployments if d.adapter(name) is not None]
        with_adapter = [d for d in with_adapter if d.is_default_version] or with_adapter
        titled = [d for d in self.deployments if d.title == name]
        owner, _, adapter = name.rpartition(":")
        exactly = [d for d in self.deployments if d.answers_to(owner) and d.adapter(adapter) is not None]
        return (
            self._first(of_model, None)
            or self._first(with_adapter, name)
            or self._first(titled, None)
            or self._first(exactly, adapter)
        )

    def listed_adapter(self, entry: DeploymentEntry, adapter: AdapterEntry) -> str:
        """The shortest name that resolves to this adapter of this deployment: its own, or `deployment:adapter`."""
        found = self.resolve(adapter.name)
        alone = found is not None and (found.deployment.name, found.adapter) == (entry.name, adapter)
        return adapter.name if alone else f"{entry.name}:{adapter.name}"

    @staticmethod
    def _first(found: Sequence[DeploymentEntry], adapter: str | None) -> Resolved | None:
        """The deployment of these, oldest first, that a shared name means, with its adapter of this name."""
        if not found:
            return None
        chosen = min(found, key=lambda d: (not d.is_default, not d.workers))
        return Resolved(chosen, None if adapter is None else chosen.adapter(adapter))


def hash_key(key: str) -> str:
    """The hash that djangorestframework-api-key stores. Keys are random, so a fast hash is safe."""
    return "sha512$$" + hashlib.sha512(key.encode()).hexdigest()


class SnapshotHolder:
    """Holds the current snapshot and notifies listeners of a new one."""

    def __init__(self) -> None:
        self.current = Snapshot()
        self._building = threading.Lock()
        self._listeners: list[Callable[[Snapshot], object]] = []

    def subscribe(self, listener: Callable[[Snapshot], object]) -> None:
        """Call `listener` with every new snapshot, from the thread that publishes it."""
        self._listeners.append(listener)

    def refresh(self, build: Callable[[], Snapshot]) -> None:
        """Build and publish a snapshot. One caller at a time, so that an older snapshot never replaces a newer one."""
        with self._building:
            self.publish(build())

    def publish(self, snapshot: Snapshot) -> None:
        """Replace the snapshot and call the listeners, if it differs from the current one."""
        if snapshot != self.current:
            self.current = snapshot
            for listener in self._listeners:
                listener(snapshot)
