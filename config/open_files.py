"""The limit of open files (RLIMIT_NOFILE): each connection is one, and a shell's usual limit is 1024."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from config.options import Options

MOST_FILES = 1 << 16
OWN_FILES = 256
"""Files that a process opens besides connections, with room: libraries, the database, workers, logs."""


def reachable_limit() -> int:
    """The limit that this process may give itself, at most MOST_FILES."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)


def wanted_files(options: Options) -> int:
    """The files of a process with all the connections that one address of it may have."""
    return options.max_connections + OWN_FILES


def allow_open_files() -> None:
    """Raise the limit as far as it may be, up to MOST_FILES; a higher one stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = reachable_limit()
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
