"""What DJL Serving answers when an adapter cannot be registered or updated: 424, or 507 where slots or memory are short."""

from __future__ import annotations

from engine.adapters.failures import AdapterCode
from inference.dialects.djl.errors import DEPENDENCY, OUT_OF_RESOURCES, bad_request, conflict
from inference.errors import (
    AdapterExists,
    AdapterNameTaken,
    AdapterNotFound,
    AdapterRefused,
    ServingError,
    TooManyAdapters,
)

NO_SLOT = frozenset({AdapterCode.PINNED_SLOTS, AdapterCode.CACHE_IN_USE})
NO_ROOM = frozenset({AdapterCode.LOAD_FAILED, AdapterCode.SLOT_FAILED})
"""Failures whose reason is the name of an exception."""
MAX_SHOWN = 1000
"""Characters of a client's path that a message repeats."""


def failed(error: ServingError, alias: str, source: str) -> ServingError:
    """The error of this dialect for an adapter that the server refused; others are returned unchanged."""
    if isinstance(error, AdapterExists):
        return conflict(
            f"The adapter {alias} already exists. If you want to replace it, please unregistering before registering a "
            "new adapter with the same name."
        )
    if isinstance(error, AdapterNotFound):
        return bad_request(
            f"Only local LoRA models are supported. {source[:MAX_SHOWN]} is not a valid path", DEPENDENCY
        )
    if isinstance(error, AdapterNameTaken):
        return conflict(f"The name {alias} is the name of a model. Choose another name for the adapter.")
    if isinstance(error, TooManyAdapters):
        return bad_request(f"No free lora slots: {error.message}", OUT_OF_RESOURCES)
    if isinstance(error, AdapterRefused):
        return _refused(error, alias)
    return error


def _refused(error: AdapterRefused, alias: str) -> ServingError:
    if error.code in NO_SLOT:
        return bad_request(f"No free lora slots for adapter {alias}: {error.message}", OUT_OF_RESOURCES)
    if error.code in NO_ROOM and "Memory" in str(error.facts.get("reason")):
        return bad_request(f"Not enough memory for adapter {alias}: {error.message}", OUT_OF_RESOURCES)
    return bad_request(f"Adapter {alias} cannot be served: {error.message}", DEPENDENCY)
