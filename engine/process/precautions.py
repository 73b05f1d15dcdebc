"""What a process asks of the system before it works on clients' input: no image of its memory on disk, and who ends first when
memory is out.
"""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

VICTIM = 500
"""Of 1000: the kernel ends workers, which are replaced, before what holds the clients' connections (proc(5), oom_score_adj)."""


def write_no_core() -> None:
    """A crash writes no core file, which would hold keys and prompts. The hard limit stays, so prlimit(1) can allow one."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def go_first() -> None:
    """Be ended before other processes when memory is out; the children too."""
    path = Path("/proc/self/oom_score_adj")
    with suppress(OSError):  # another kernel, or a sandbox without /proc
        path.write_text(str(max(VICTIM, int(path.read_text()))))
