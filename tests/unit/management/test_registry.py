"""The registry as the data plane uses it."""

from __future__ import annotations

import asyncio
import threading

from config.registry import DjangoRegistry
from inference.workers.registry import NewDeployment


async def test_short_calls_do_not_wait_for_creations(monkeypatch):
    copied = threading.Event()
    monkeypatch.setattr(DjangoRegistry, "_create", lambda *_: copied.wait())
    monkeypatch.setattr(DjangoRegistry, "_deployments", lambda _: [])
    registry = DjangoRegistry(None, None)
    wanted = NewDeployment(["demo"], "demo")
    creations = [asyncio.ensure_future(registry.create_deployment(wanted, "tester")) for _ in range(8)]
    await asyncio.sleep(0)  # each has asked for a thread
    try:
        assert await registry.deployments() == []
    finally:
        copied.set()
        await asyncio.gather(*creations)
