"""Where a dialect's tests send their requests: those marked `live` to a running server, others to the planes here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.in_process import InProcessServer
from tests.live import LiveServer


@pytest.fixture(scope="session")
def in_process() -> Iterator[InProcessServer]:
    """The planes over a fake worker."""
    server = InProcessServer().start()
    yield server
    server.stop()


@pytest.fixture
def server(request: pytest.FixtureRequest) -> LiveServer | InProcessServer:
    """What the test's mark says."""
    live = request.node.get_closest_marker("live") is not None
    return request.getfixturevalue("running_server" if live else "in_process")
