"""The memory that this process may still use: what the machine has, limited by its control groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

from engine.process.control_groups import PROC, folders

if TYPE_CHECKING:
    from pathlib import Path

FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""By the groups' version: the limit in bytes, what is used of it, and what of that the kernel gives back first, a line of `memory.stat`."""


def free_memory(proc: Path = PROC) -> int:
    """Bytes that are free in the machine, at most what the control groups leave; 0 if they leave none.

    `proc` is the folder of the process in /proc.
    """
    left = [_left(version, folder) for version, folder in folders("memory", proc)]
    machine: int = psutil.virtual_memory().available
    return max(0, min([machine, *(each for each in left if each is not None)]))


def _left(version: int, folder: Path) -> int | None:
    """What the group leaves; None if it has no limit."""
    limit_file, usage_file, inactive = FILES[version]
    try:
        limit = (folder / limit_file).read_text().strip()
        used = int((folder / usage_file).read_text())
        lines = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if limit == "max":  # version 1 has a huge number instead
        return None
    # Files that nobody has used lately are read again if need be.
    reclaimable = next((int(value) for name, value in lines if name == inactive), 0)
    return int(limit) - used + reclaimable
