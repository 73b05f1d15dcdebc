"""Loads adapters and assigns them to slots.

Three tiers: disk; a cache of `max_cached_adapters` packed adapters in memory; and `max_adapters` slots that can
compute. Cache and slots evict the least recently used adapter, never a pinned one or one with running requests. Files
are read by one separate thread.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from engine.adapters.failures import AdapterCode, AdapterError, AdapterFailure
from engine.adapters.peft import read_adapter

if TYPE_CHECKING:
    from collections.abc import Collection

    from engine.adapters.failures import Facts
    from engine.adapters.peft import Adapter
    from engine.messages import AdapterRef

logger = logging.getLogger(__name__)

PAUSE_S = 0.002
"""Seconds between two pieces of loading while requests run; a piece takes a fraction of that."""


class AdapterLayer(Protocol):
    """A layer that takes adapters. It may combine several of the model's layers: `parts` are their (path, outputs)."""

    parts: list[tuple[str, int]]
    in_features: int
    other_rows: bool
    """Whether the layer was called with other rows than the step's, so that their adapters are unknown."""

    def make(self, adapter: Adapter) -> Any:
        """Pack the adapter's weights for this layer; None if it does not adapt the layer. Any thread may call this. Raises
        AdapterError.
        """
        ...

    def put(self, digest: str, weights: Any) -> None:
        """Put the adapter, packed by `make`, into a slot. Called only between steps."""
        ...

    def drop(self, digest: str) -> None:
        """Remove the adapter from its slot. Called only between steps."""
        ...


@dataclass(slots=True, eq=False)
class _Entry:
    """One adapter: being loaded, loaded, or failed."""

    ref: AdapterRef
    loading: Future[list[Any]] | None
    packed: list[Any] = field(default_factory=list)
    error: AdapterFailure | None = None
    told: bool = False
    """Whether somebody was told the error."""
    pinned: bool = False
    in_slot: bool = False
    used: int = 0


class AdapterSlots:
    """The adapters of one model. Not thread-safe: one loop owns it. Only loading runs on another thread."""

    def __init__(self, layers: list[AdapterLayer], max_adapters: int, max_cached: int, max_rank: int) -> None:
        self.layers, self.max_adapters, self.max_rank = layers, max_adapters, max_rank
        self.max_cached = max(max_cached, max_adapters)
        self.shapes = {path: (out, layer.in_features) for layer in layers for path, out in layer.parts}
        self._entries: dict[str, _Entry] = {}
        self._clock = count(1)
        self._considerate = False
        self._loader = ThreadPoolExecutor(1, "adapter-loader", initializer=torch.set_num_threads, initargs=(1,))

    @property
    def in_slots(self) -> list[str]:
        """Digests of the adapters in slots."""
        return [digest for digest, entry in self._entries.items() if entry.in_slot]

    @property
    def failures(self) -> dict[str, AdapterFailure]:
        """Why adapters could not be loaded, by digest."""
        return {digest: entry.error for digest, entry in self._entries.items() if entry.error is not None}

    def check(self, directory: Path) -> AdapterFailure | None:
        """Why the adapter in this directory cannot be served; None if it can. Nothing of it is kept."""
        if not self.layers:
            return AdapterFailure(AdapterCode.NO_ADAPTER_LAYERS)
        try:
            read_adapter(directory, self.shapes, self.max_rank)
        except AdapterError as error:
            return error.failure
        return None

    def request(self, ref: AdapterRef) -> AdapterFailure | None:
        """Called for each new request with the adapter; forgets an earlier failure to load it, once those who waited have been told.
        Returns the reason if the model takes no adapters.
        """
        if not self.layers:
            return AdapterFailure(AdapterCode.NO_ADAPTER_LAYERS)
        entry = self._entries.get(ref.digest)
        if entry is not None and entry.error is not None and entry.told:  # try again: the files may have been repaired
            del self._entries[ref.digest]
        return None

    def begin(self, ref: AdapterRef, keep: Collection[str]) -> bool:
        """Start loading an unknown adapter. If the cache is full, evict an adapter that is not in `keep`; False if none
        can be evicted.
        """
        if ref.digest in self._entries:
            return True
        if len(self._entries) >= self.max_cached:
            idle = [e for e in self._entries.values() if not (e.loading or e.pinned or e.ref.digest in keep)]
            if not idle:
                return False
            oldest = min(idle, key=lambda e: (e.in_slot, e.used))
            if oldest.in_slot:
                self._leave(oldest)
            del self._entries[oldest.ref.digest]
        self._entries[ref.digest] = _Entry(ref, self._loader.submit(self._load, ref), used=next(self._clock))
        return True

    def poll(self, busy: bool = False) -> None:
        """Collect the adapters that finished loading. While the engine is `busy`, the loader thread pauses between
        pieces.
        """
        self._considerate = busy
        for entry in self._entries.values():
            if entry.loading is None or not entry.loading.done():
                continue
            try:
                entry.packed = entry.loading.result()
            except AdapterError as error:
                entry.error = error.failure
            except Exception as error:  # an outer boundary: the engine goes on, whatever is wrong with the files
                logger.exception("adapter not loaded", extra={"digest": entry.ref.digest})
                entry.error = AdapterFailure(AdapterCode.LOAD_FAILED, {"reason": type(error).__name__})
            entry.loading = None

    def failure(self, digest: str) -> AdapterFailure | None:
        """Why the adapter failed; None unless it did."""
        entry = self._entries.get(digest)
        if entry is None or entry.error is None:
            return None
        entry.told = True
        return entry.error

    def loading(self, digest: str) -> bool:
        """Whether the adapter is being read."""
        entry = self._entries.get(digest)
        return entry is not None and entry.loading is not None

    def loaded(self, digest: str) -> bool:
        """Whether the adapter is loaded."""
        entry = self._entries.get(digest)
        return entry is not None and entry.loading is None and entry.error is None

    def acquire(self, ref: AdapterRef, busy: Collection[str]) -> bool:
        """Put a loaded adapter into a slot, unless it is in one. False if every slot is pinned or in `busy`, or if the
        device has no memory for it (see `failure`).
        """
        entry = self._entries[ref.digest]
        entry.used = next(self._clock)
        if entry.in_slot:
            return True
        standing = [e for e in self._entries.values() if e.in_slot]
        if len(standing) >= self.max_adapters:
            free = [e for e in standing if not e.pinned and e.ref.digest not in busy]
            if not free:
                return False
            self._leave(min(free, key=lambda e: e.used))
        return self._enter(entry)

    def pinned(self, digest: str) -> bool:
        """Whether the adapter is pinned: it is not evicted."""
        return self._entries[digest].pinned

    def pin(self, ref: AdapterRef, pinned: bool) -> AdapterFailure | None:
        """Pin or unpin a loaded adapter. Returns the reason if it cannot be pinned."""
        entry = self._entries.get(ref.digest)
        if entry is None or entry.loading is not None or entry.error is not None:
            return AdapterFailure(AdapterCode.NOT_LOADED)
        if pinned and not entry.pinned:
            others = sum(e.pinned for e in self._entries.values())
            if others + 1 >= self.max_adapters:
                facts: Facts = {"limit": self.max_adapters - 1, "slots": self.max_adapters}
                return AdapterFailure(AdapterCode.PINNED_SLOTS, facts)
        entry.pinned = pinned
        return None

    def unload(self, digest: str, busy: Collection[str]) -> AdapterFailure | None:
        """Remove an adapter from slot and cache. Returns the reason if it is in use."""
        entry = self._entries.get(digest)
        if entry is None:
            return None
        if digest in busy or entry.loading is not None:
            return AdapterFailure(AdapterCode.IN_USE)
        if entry.in_slot:
            self._leave(entry)
        del self._entries[digest]
        return None

    def close(self) -> None:
        """Stop loading."""
        self._loader.shutdown(wait=False, cancel_futures=True)

    def _load(self, ref: AdapterRef) -> list[Any]:
        begin = time.monotonic()
        logger.info("reading the adapter in %s", ref.directory)
        adapter = read_adapter(Path(ref.directory), self.shapes, self.max_rank, self._pause, ref.digest)
        logger.info(
            "read the adapter in %s: %d layers, %.1f s", ref.directory, len(adapter.modules), time.monotonic() - begin
        )
        packed = []
        for layer in self.layers:
            packed.append(layer.make(adapter))
            self._pause()
        return packed

    def _pause(self) -> None:
        """Sleep while the engine is busy, so that the step loop gets the CPU and the GIL."""
        if self._considerate:
            time.sleep(PAUSE_S)

    def _enter(self, entry: _Entry) -> bool:
        entry.in_slot = True
        try:
            for layer, packed in zip(self.layers, entry.packed, strict=True):
                layer.put(entry.ref.digest, packed)
        except torch.AcceleratorError:  # the device itself is broken
            raise
        except RuntimeError as error:  # torch raises it when memory is exhausted
            logger.exception("adapter not put into a slot", extra={"digest": entry.ref.digest})
            self._leave(entry)
            entry.error = AdapterFailure(AdapterCode.SLOT_FAILED, {"reason": type(error).__name__})
            return False
        return True

    def _leave(self, entry: _Entry) -> None:
        entry.in_slot = False
        for layer in self.layers:
            layer.drop(entry.ref.digest)
