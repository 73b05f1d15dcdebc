"""Dragoman, from the working copy."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

from benchmarks.machine import ROOT, commit
from benchmarks.peers.base import MAX_TOKENS, Launch, Setup
from loadtests.server import environment, free_port


class Dragoman:
    """`manage.py serve` with its front plane alone."""

    name = "dragoman"

    def install(self, cache: Path, log: Path) -> dict[str, str]:
        versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "numba")}
        return {self.name: commit(), **versions}

    def launch(self, setup: Setup, log: Path) -> Launch:
        settings = {
            "MODEL": str(setup.model),
            "DTYPE": setup.dtype,
            "QUANTIZATION": setup.quantization,
            "THREADS": str(setup.threads),
            "MAX_MODEL_LEN": str(MAX_TOKENS),
            # Models with random weights repeat themselves and would accept too many draft tokens.
            "SPECULATIVE_TOKENS": "0",
        }
        return Launch(
            [sys.executable, "-W", "ignore", str(ROOT / "manage.py"), "serve"],
            environment(setup.port, free_port(), setup.folder, settings),
            setup.name,
        )
