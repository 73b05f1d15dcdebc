"""The machine and the commit that figures belong to."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent


class Machine(msgspec.Struct, frozen=True):
    """Where Locust ran, and a server of its own too."""

    processor: str
    cores: int
    memory_gib: int
    system: str


def machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> Machine:
    """The one at hand; cores are those that this process may use."""
    facts: dict[str, str] = {}
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    numbers = f" ({facts.get('cpu family', '?')}/{facts.get('model', '?')})" if "model name" in facts else ""
    return Machine(
        processor=facts.get("model name", platform.machine()) + numbers,
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        system=f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
    )


def commit() -> str:
    """The working copy's commit, with `-dirty` if files differ from it; "unknown" outside of one, and without git."""
    if shutil.which("git") is None:
        return "unknown"
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
