"""How the workers on one host share its CPUs. Nothing pins a worker to CPUs: it only gets as many threads as its share."""

from __future__ import annotations

MAX_THREADS = 1024
"""The bound of the engine option `threads`."""


def threads_of(workers_on_host: int, cpus: int) -> int:
    """The engine option `threads` of one of so many workers, at least 1; 0 for a single worker, which counts the CPUs
    itself.
    """
    if workers_on_host <= 1:
        return 0
    return min(max(1, cpus // workers_on_host), MAX_THREADS)
