"""The demo model's adapters, and what a test's own adapter store holds (`conftest.store`)."""

from __future__ import annotations

from tests.conftest import ROOT

ADAPTERS = ROOT / "models" / "demo-adapters"
PIRATE, JSON = str(ADAPTERS / "pirate"), str(ADAPTERS / "json")


def left(store):
    """The names in the store."""
    return sorted(path.name for path in store.iterdir()) if store.exists() else []
