"""OpenVINO GenAI behind a thin server of ours, because it ships none."""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.environments import Environment, run
from benchmarks.machine import machine, native_dtype
from benchmarks.peers.base import CACHE_GIB, MAX_SEQUENCES, Launch, Setup

PINS = {
    "torch": "2.13.0", "optimum-intel": "2.2.0", "openvino": "2026.4.1", "openvino-genai": "2026.4.1.0",
    "openvino-tokenizers": "2026.4.1.0", "aiohttp": "3.14.5",
}  # fmt: skip
# Run with -P: its folder has modules that are called like packages that it imports.
SERVER = Path(__file__).with_name("openvino_server.py")
PRECISIONS = {"bfloat16": "bf16", "float32": "f32"}
"""Without bfloat16 instructions OpenVINO computes in float32, and where there is AVX-512 it refuses to start when asked for another type."""
WEIGHTS = {"bfloat16": "fp16", "float32": "fp32"}
"""The export knows no bfloat16; products are in the server's precision."""


class OpenVino:
    """Continuous batching with OpenVINO's own defaults for the cache's type."""

    name = "openvino"

    def install(self, cache: Path, log: Path) -> dict[str, str]:
        environment = _environment(cache)
        environment.install(log)
        # PyPI's build expects torch with CUDA.
        environment.remove(log, "torchvision")
        return environment.versions("transformers")

    def launch(self, setup: Setup, log: Path) -> Launch:
        environment = _environment(setup.cache)
        weights = WEIGHTS[setup.dtype] if setup.quantization == "none" else setup.quantization
        model = setup.cache / "openvino-models" / f"{setup.name}-{weights}"
        if not model.exists():
            _export(environment, setup, weights, model, log)
        command = [
            environment.python, "-P", str(SERVER), "--model", str(model), "--name", setup.name, "--port", str(setup.port),
            "--threads", str(setup.threads), "--precision", PRECISIONS[setup.dtype if native_dtype(machine().flags) == "bfloat16" else "float32"],
            "--cache-gib", str(CACHE_GIB), "--max-sequences", str(MAX_SEQUENCES),
        ]  # fmt: skip
        return Launch(command, {"HF_HUB_OFFLINE": "1"}, setup.name)


def _export(environment: Environment, setup: Setup, weights: str, target: Path, log: Path) -> None:
    """In a folder beside the target, which exists only when it is whole."""
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    command = [environment.python, str(environment.folder / "bin" / "optimum-cli"), "export", "openvino"]
    options = [
        "--model",
        str(setup.model),
        "--task",
        "text-generation-with-past",
        "--weight-format",
        weights,
    ]
    run([*command, *options, str(unfinished)], log, {"HF_HUB_OFFLINE": "1"})
    unfinished.rename(target)


def _environment(cache: Path) -> Environment:
    return Environment(cache / "openvino", PINS)
