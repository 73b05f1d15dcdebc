"""The fast tier: the data plane over fake workers, the control plane over fake processes. Nothing here imports torch."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from inference.http.refusals import Sample
from tests.unit.serving import Serving, fake_workers

Start = Callable[..., Awaitable[Serving]]


@pytest.fixture(autouse=True)
def every_refusal_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tests before were refused."""
    monkeypatch.setattr("inference.http.refusals._sample", Sample())


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder whose path is short: that of a Unix socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="dragoman-unit-") as folder:
        yield Path(folder)


@pytest_asyncio.fixture
async def start(sockets: Path) -> AsyncIterator[Start]:
    """Begin to serve, with as many workers and such settings as the test names."""
    running = []

    async def begin(count: int = 1, info: Any = None, **settings: Any) -> Serving:
        running.append(await Serving(fake_workers(sockets, count, info=info), **settings).start())
        return running[-1]

    yield begin
    for serving in running:
        await serving.stop()


@pytest_asyncio.fixture
async def serving(start: Start) -> Serving:
    """One deployment with one worker."""
    return await start()
