"""What a server must say of itself to be measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

MAX_TOKENS = 2048
"""Longest sequence that servers are started for."""
MAX_SEQUENCES = 64
CACHE_GIB = 2
"""Memory for keys and values, where a server wants to be told."""


@dataclass(frozen=True)
class Setup:
    """What all servers are given alike. `folder` is empty and the server's own; `cache` stays between measurements.
    `quantization` is "none" or "int8": of weights, which are given in `dtype`.
    """

    cache: Path
    folder: Path
    model: Path
    dtype: str
    threads: int
    port: int
    quantization: str = "none"

    @property
    def name(self) -> str:
        """What the model is called."""
        return self.model.name


@dataclass(frozen=True)
class Launch:
    """How a server is started, and how it is asked. Its /health answers 200 when it is ready."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    model: str = ""
    plain: bool = False


class Peer(Protocol):
    """A kind of server. Every method may raise CommandError."""

    name: str

    def install(self, cache: Path, log: Path) -> dict[str, str]:
        """Install what is missing; the versions of what counts."""
        ...

    def launch(self, setup: Setup, log: Path) -> Launch:
        """Convert the model if need be, once for all time, and say how to start the server."""
        ...
