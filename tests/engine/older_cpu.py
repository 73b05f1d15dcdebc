"""A pytest plugin that compiles the kernels as an older x86 CPU would get them: `-p tests.engine.older_cpu`, with OLDER_CPU "avx2" or
"avx512". Newer instructions are neither used nor reported. It says nothing about speed.
"""

from __future__ import annotations

import os
from typing import Any

import numba
from llvmlite import binding

HIDDEN = {
    "avx2": ("avx512", "avx10", "avxvnni", "avxneconvert", "avxifma", "amx"),
    "avx512": ("avx512bf16", "avx512fp16", "avx512vnni", "avx10", "avxvnni", "avxneconvert", "avxifma", "amx"),
}
"""Beginnings of the names of what the CPU lacks."""
MODELS = {"avx2": "haswell", "avx512": "skylake-avx512"}

kind = os.environ["OLDER_CPU"]
features = binding.get_host_cpu_features()
for name in features:
    if name.startswith(HIDDEN[kind]):
        features[name] = False
if not features["avx2" if kind == "avx2" else "avx512f"]:
    raise RuntimeError(f"this CPU does not run {kind} code")
binding.get_host_cpu_features = lambda: features
binding.get_host_cpu_name = lambda: MODELS[kind]
numba.config.CPU_NAME, numba.config.CPU_FEATURES = MODELS[kind], features.flatten()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    from engine.cpu.kernels.emit import HELD, has_bf16_dot

    passed = len(terminalreporter.stats.get("passed", ()))
    terminalreporter.write_line(f"{passed} passed with {HELD} vectors, dot products: {has_bf16_dot()}")
