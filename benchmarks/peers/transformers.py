"""transformers' own server with continuous batching."""

from __future__ import annotations

from pathlib import Path

from benchmarks.environments import CommandError, Environment
from benchmarks.peers.base import Launch, Setup

PINS = {"torch": "2.13.0", "transformers[serving]": "5.23.0"}
MEMORY_PERCENT = "0.2"
"""Its own default takes most of the memory, which other servers need as well."""


class Transformers:
    """`transformers serve`; it takes texts only, and calls the model by its folder."""

    name = "transformers"

    def install(self, cache: Path, log: Path) -> dict[str, str]:
        environment = _environment(cache)
        environment.install(log)
        return environment.versions()

    def launch(self, setup: Setup, log: Path) -> Launch:
        if setup.quantization != "none":
            raise CommandError(
                f"{self.name} does not quantize weights to {setup.quantization} when it loads them on a CPU"
            )
        environment = _environment(setup.cache)
        command = [
            environment.python, str(environment.folder / "bin" / "transformers"), "serve", str(setup.model),
            "--continuous-batching", "--cb-max-memory-percent", MEMORY_PERCENT, "--device", "cpu",
            "--dtype", setup.dtype, "--host", "127.0.0.1", "--port", str(setup.port),
        ]  # fmt: skip
        variables = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(setup.threads)}
        return Launch(command, variables, str(setup.model), plain=True)


def _environment(cache: Path) -> Environment:
    return Environment(cache / "transformers", PINS)
