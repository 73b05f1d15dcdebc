"""The models that servers are measured with: names, and the arrival rates that they are asked with."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.environments import run
from benchmarks.machine import ROOT

RATES = {"smollm2-135m": 0.5, "qwen2.5-0.5b": 0.25, "qwen3-0.6b": 0.2, "llama-3.2-1b": 0.1, "demo": 2.0}
"""Requests per second of the open loop: what two cores of a server CPU can just follow."""
DEMO = ROOT / "models" / "demo"


def model(shape: str, dtype: str, cache: Path, log: Path) -> Path:
    """The model's folder, made if it is not there; raises CommandError. Another process makes it, because torch is large."""
    if shape == "demo":
        return DEMO
    folder = cache / "models" / dtype / shape
    if not folder.exists():
        run([sys.executable, "-m", "benchmarks.models", shape, dtype, str(folder)], log, {"PYTHONPATH": str(ROOT)})
    return folder
