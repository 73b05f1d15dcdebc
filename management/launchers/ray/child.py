"""Becomes a worker that the kernel kills with its parent: `child.py PARENT_PID`. Run as a file, before anything is imported.

The kernel's word holds across exec; set between fork and exec in a process with many threads, it could block for ever.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):  # it ended before the kernel was told
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, "-m", "engine"])
