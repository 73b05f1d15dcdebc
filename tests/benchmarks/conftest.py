"""Fake servers as processes, and words of the demo model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.loads import Words
from benchmarks.peers.base import Launch
from benchmarks.servers import OwnServer
from loadtests.server import free_port
from tests.conftest import DEMO

FAKE = Path(__file__).with_name("fake_server.py")


@pytest.fixture(scope="session")
def words() -> Words:
    return Words(DEMO / "tokenizer.json")


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Callable[..., OwnServer]]:
    """Makes servers by name; they are stopped afterwards."""
    made: list[OwnServer] = []

    def make(name: str, *arguments: str) -> OwnServer:
        port = free_port()
        launch = Launch([sys.executable, str(FAKE), str(port), *arguments], {"FAKE_SETTING": "1"}, "fake")
        made.append(OwnServer(name, launch, port, tmp_path / f"{name}.log", 60))
        return made[-1]

    yield make
    for server in made:
        server.stop()
