"""The machine and the commit that figures belong to."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent
MATRIX_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")


class Machine(msgspec.Struct, frozen=True):
    """What servers ran on. `family_model` tells processors apart whose name a virtual machine hides."""

    processor: str
    family_model: str
    flags: tuple[str, ...]
    cores: int
    memory_gib: int
    system: str


def machine(cpuinfo: str | None = None) -> Machine:
    """The one at hand. `cpuinfo` stands for /proc/cpuinfo; cores are those that this process may use."""
    text = Path("/proc/cpuinfo").read_text() if cpuinfo is None else cpuinfo
    facts: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            facts.setdefault(name.strip(), value.strip())
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    return Machine(
        processor=facts.get("model name") or platform.machine(),
        family_model=f"{facts.get('cpu family', '')}/{facts.get('model', '')}",
        flags=tuple(flag for flag in MATRIX_FLAGS if flag in flags),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        system=f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
    )


def native_dtype(flags: tuple[str, ...]) -> str:
    """The type in which servers are compared: bfloat16 where the CPU has instructions for it, else float32."""
    return "bfloat16" if {"avx512_bf16", "amx_bf16"} & set(flags) else "float32"


def commit() -> str:
    """The working copy's commit, with `-dirty` if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
