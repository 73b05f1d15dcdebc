"""Waits that end at the moment in which their task is cancelled: the task ends all the same."""

from __future__ import annotations

import asyncio

import pytest

from inference.admission.rates import RateMeter
from inference.admission.shared_rates import SharedRates
from tests.waiting import PATIENCE_S

TURNS = range(6)
"""Turns of the event loop between what ends the wait and the cancellation."""


class Nobody:
    """A ledger that nobody else uses."""

    closed = False

    async def exchange(self, entries):
        return 1, []

    async def close(self):
        self.closed = True


class Reader:
    """A client that has stopped reading."""

    def __init__(self) -> None:
        self.writable = asyncio.Event()
        self.waited = asyncio.Event()
        wait = self.writable.wait

        async def noted() -> bool:
            self.waited.set()
            return await wait()

        self.writable.wait = noted


async def ends(task: asyncio.Task[None], turns: int) -> None:
    """Cancel a task after so many turns; it must not go on."""
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task}, timeout=PATIENCE_S)
    stopped = task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert stopped


@pytest.mark.parametrize("turns", TURNS)
async def test_shared_rates(turns, monkeypatch):
    monkeypatch.setattr("inference.admission.shared_rates.EVERY_S", 0.0)
    meter, ledger = RateMeter(), Nobody()
    rates = SharedRates(meter, ledger)
    task = asyncio.create_task(rates.run())
    for _ in range(20):  # it waits for news
        await asyncio.sleep(0)
    meter.on_news()
    await ends(task, turns)
    assert ledger.closed


@pytest.mark.parametrize("turns", TURNS)
async def test_a_response_whose_client_reads_again_as_it_leaves(turns):
    from inference.server.plane_server import PlaneServer  # it installs a reactor

    server, reader = object.__new__(PlaneServer), Reader()
    server.connections, server.slow_client_timeout_s = {}, 60.0
    written = []

    async def respond() -> None:
        await server.handle_reply(reader, {"type": "http.response.body"})
        written.append(1)
        await asyncio.Event().wait()

    task = asyncio.create_task(respond())
    await reader.waited.wait()
    reader.writable.set()
    await ends(task, turns)
    assert task.cancelled()
