"""Times of work on a device: of single launches captured in a graph, and the rate at which the device copies."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

LEAST_CAPTURED, REPLAYS = 100, 20
WARM_S = 0.05
"""An idle device runs slower at first."""


def microseconds(run: Callable[[int], object], device: torch.device, copies: int = 1) -> float:
    """Of one call, the best of some replays. `run` takes the call's number, of which each of so many copies has at
    least one.

    Without a device it runs once.
    """
    if device.type != "cuda":
        begun = time.perf_counter()
        run(0)
        return (time.perf_counter() - begun) * 1e6
    captured = max(LEAST_CAPTURED, copies)
    run(0)
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for number in range(captured):
            run(number)
    begun = time.perf_counter()
    while time.perf_counter() - begun < WARM_S:
        graph.replay()
        torch.cuda.synchronize()
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / captured * 1e3)
    return min(times)


def copy_rate(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes, the best of ten of a gigabyte (without a device of a megabyte)."""
    source = torch.empty(1 << (30 if device.type == "cuda" else 20), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / min(copy_s(source, target) for _ in range(10))


def copy_s(source: torch.Tensor, target: torch.Tensor) -> float:
    """Seconds of one copy, by the device's own clock."""
    if source.device.type != "cuda":
        begun = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - begun
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def wait(device: torch.device) -> None:
    """Until the device has nothing to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
