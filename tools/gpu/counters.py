"""The part `counters`: the five kernels that decode spends most time in, and what Nsight Compute counts of them where it works.

python -m tools.gpu.counters MODEL        decodes without graphs, which Nsight Compute counts kernel by kernel
"""

from __future__ import annotations

import csv
import functools
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.gpu.backend import DeviceBackend
from tools.gpu.models import engine_of, model_of
from tools.gpu.results import Figure
from tools.gpu.steps import drive, prompts_of

if TYPE_CHECKING:
    from tools.gpu.part import Run

STREAMS, PROMPT, TOKENS, KERNELS = 32, 128, 16, 5
METRICS = {
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "% of the memory's peak",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "% of the multiprocessors' peak",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "% of the warps",
}
COUNTED = 60
"""Launches of these kernels in all; each takes some tens of milliseconds."""
TIMEOUT_S = 60


def run(run: Run) -> None:
    """Times by torch's profiler, then counters."""
    streams, length = (2, 24) if run.dry else (STREAMS, PROMPT)
    model = functools.cache(lambda: model_of(run, run.argument))

    @functools.cache
    def longest() -> dict[str, tuple[float, int]]:
        core = engine_of(run, model(), streams=streams)
        drive(core, prompts_of(streams, length, seed=1), TOKENS)
        kind = ProfilerActivity.CPU if run.dry else ProfilerActivity.CUDA
        with profile(activities=[kind], acc_events=True) as profiler:
            drive(core, prompts_of(streams, length, seed=2), TOKENS)
        core.close()
        spent = {
            e.key: (e.cpu_time_total if run.dry else e.device_time_total, e.count) for e in profiler.key_averages()
        }
        return dict(sorted(spent.items(), key=lambda each: -each[1][0])[:KERNELS])

    def times() -> list[Figure]:
        return [
            Figure(row=f"{run.argument}, {streams} streams, {base_name(name)}", unit=unit, value=value)
            for name, (total, count) in longest().items()
            for unit, value in (("µs", total / count), ("launches", count))
        ]

    def counters() -> list[Figure]:
        reason = unavailable(run)
        if reason:
            return [Figure(row=f"Nsight Compute: {reason}", unit="kernels counted", value=0)]
        return counted(model(), {base_name(name) for name in longest()})

    run.measure("times", times)
    run.measure("counters", counters)


def base_name(name: str) -> str:
    """A kernel's name without its return type, namespaces, template arguments and parameters, as Nsight Compute matches it."""
    return name.partition("(")[0].partition("<")[0].rpartition("::")[2].split()[-1]


def unavailable(run: Run) -> str:
    """Why Nsight Compute can count nothing here; empty if it can. It is asked to count one kernel of torch's."""
    if run.dry:
        return "no device"
    if shutil.which("ncu") is None:
        return "not installed"
    trial = "import torch; torch.ones(1 << 20, device='cuda').add_(1); torch.cuda.synchronize()"
    command = ["ncu", "--metrics", next(iter(METRICS)), "--launch-count", "1", sys.executable, "-c", trial]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    told = [line for line in (done.stdout + done.stderr).splitlines() if "==ERROR==" in line]
    return told[0].replace("==ERROR==", "").strip()[:120] if told else ""


def counted(model: Path, names: set[str]) -> list[Figure]:
    """Means over a few launches of each kernel, past those of the proof and of the prompts."""
    pattern = f"regex:^({'|'.join(map(re.escape, sorted(names)))})$"
    command = [
        "ncu",
        "--csv",
        "--metrics",
        ",".join(METRICS),
        "--kernel-name-base",
        "function",
        "--kernel-name",
        pattern,
    ]
    command += ["--clock-control", "none", "--launch-skip", "200", "--launch-count", str(COUNTED)]
    command += [sys.executable, "-W", "ignore", "-m", "tools.gpu.counters", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in csv.DictReader(lines):
        values[base_name(row["Kernel Name"]), row["Metric Name"]].append(float(row["Metric Value"].replace(",", "")))
    return [
        Figure(row=f"{model.name}, {STREAMS} streams, {name}", unit=METRICS[metric], value=sum(each) / len(each))
        for (name, metric), each in values.items()
    ]


def main() -> None:
    """Decode without graphs."""
    with mock.patch.object(DeviceBackend, "warm_up"):
        config = EngineConfig(
            model=sys.argv[1], device="cuda", max_num_seqs=STREAMS, max_model_len=2048, speculative_tokens=0
        )
        core = EngineCore(config)
    drive(core, prompts_of(STREAMS, PROMPT, seed=1), TOKENS)
    core.close()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
