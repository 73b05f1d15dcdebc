"""Memory and CPU time of processes with all that they have started, over some time.

    python -m tools.bench.process_cost PID... [--seconds 60]

Memory is PSS: pages that processes share count once. It starts nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import time

import psutil


def main() -> None:
    """Measure, and print a line for each process and the sum for each root."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pids", type=int, nargs="+", metavar="PID")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    before = {pid: cpu_s(family(pid)) for pid in options.pids}
    time.sleep(options.seconds)
    for pid in options.pids:
        total, spent = 0, 0.0
        for process in family(pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                memory, used = process.memory_full_info().pss, cpu_s([process])[process.pid]
                used -= before[pid].get(process.pid, 0.0)
                total, spent = total + memory, spent + used
                print(f"  {memory >> 20:6d} MiB {100 * used / options.seconds:6.1f} % of a CPU  {process.name()}")
        print(f"{pid}: {total >> 20} MiB, {100 * spent / options.seconds:.1f} % of a CPU")


def family(pid: int) -> list[psutil.Process]:
    """The process and its descendants."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def cpu_s(processes: list[psutil.Process]) -> dict[int, float]:
    """CPU seconds so far, by pid."""
    found = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found[process.pid] = times.user + times.system
    return found


if __name__ == "__main__":
    main()
