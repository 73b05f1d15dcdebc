"""Runs tests several times in a row, beside a process that keeps a core busy, and says what failed in any of the runs.

    python -m tests.repeat [--runs N] [--busy] [PYTEST_ARGUMENT ...]

Exit status 0: every run passed. One run without `--busy` is pytest itself.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator


@contextlib.contextmanager
def busy_core(wanted: bool) -> Iterator[None]:
    """Another process computes without a pause."""
    if not wanted:
        yield
        return
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        spinning.kill()
        spinning.wait()


def main() -> int:
    """Run, and print a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--busy", action="store_true", help="keep one core busy meanwhile")
    options, arguments = parser.parse_known_args()
    command = [sys.executable, "-m", "pytest", *arguments]
    if options.runs == 1 and not options.busy:
        os.execv(command[0], command)
    told = []
    with busy_core(options.busy):
        for run in range(1, options.runs + 1):
            began = time.monotonic()
            status = subprocess.run(command, check=False).returncode
            told.append((run, status, time.monotonic() - began))
    print("| run | exit status | seconds |\n| --- | --- | --- |")
    for run, status, seconds in told:
        print(f"| {run} | {status} | {seconds:.0f} |")
    return int(any(status for _, status, _ in told))


if __name__ == "__main__":
    sys.exit(main())
