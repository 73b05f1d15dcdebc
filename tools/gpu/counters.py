"""The parts `kernels` and `counters`: the kernels that decode spends most time in, and what Nsight Compute counts of
them where it works.

    python -m tools.gpu.counters MODEL        decodes without graphs, which Nsight Compute counts kernel by kernel
"""

from __future__ import annotations

import csv
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
from engine.messages import Submit
from engine.sampling.params import SamplingParams
from tools.gpu.models import engine_of, model_of
from tools.gpu.results import Figure
from tools.gpu.steps import CLIENT, prompts_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tools.gpu.part import Run

STREAMS, PROMPT, TOKENS, KERNELS = 32, 128, 24, 5
PROFILED = 8
"""Steps of decode."""
METRICS = {
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "% of the memory's peak",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "% of the multiprocessors' peak",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "% of the warps",
}
COUNTED = 150
"""Launches in all, of one step and some of the next; each takes some tens of milliseconds."""
TRIAL_S, TIMEOUT_S = 25, 75
NCU = (shutil.which("ncu"), *sorted(map(str, Path("/opt/nvidia/nsight-compute").glob("*/ncu"))))


def run(run: Run) -> None:
    """`times SHAPE`: by torch's profiler. `ncu SHAPE`: counters."""
    kind, shape = run.argument.split()
    if kind == "times":
        run.measure("times", lambda: times(run, shape))
    else:
        run.measure("counters", lambda: counters(run, shape))


def decoding(core: EngineCore, streams: int, length: int, begin: Callable[[], None]) -> None:
    """Submit, call `begin` once all decode, make some more steps, and drop the sequences."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts_of(streams, length, seed=1)):
        core.submit(CLIENT, Submit(number, prompt, params))
    while core.stats.decode_steps < 3:  # the first ones compile
        core.step()
    begin()
    for _ in range(PROFILED):
        core.step()
    core.abort_client(CLIENT)
    while core.has_work:
        core.step()


def times(run: Run, shape: str) -> list[Figure]:
    """Microseconds of a launch and launches a step, of the kernels that take most time."""
    streams, length = (2, 24) if run.dry else (STREAMS, PROMPT)
    core = engine_of(run, model_of(run, shape), streams=streams)
    profiler = profile(activities=[ProfilerActivity.CPU if run.dry else ProfilerActivity.CUDA], acc_events=True)
    try:
        decoding(core, streams, length, profiler.__enter__)
    finally:
        profiler.__exit__(None, None, None)
    core.close()
    spent = {
        event.key: (event.cpu_time_total if run.dry else event.device_time_total, event.count)
        for event in profiler.key_averages()
        if not event.key.startswith(("Memcpy", "Memset"))
    }
    longest = sorted(spent.items(), key=lambda each: -each[1][0])[:KERNELS]
    return [
        Figure(row=f"{shape}, {streams} streams, {base_name(name)}", unit=unit, value=value)
        for name, (total, count) in longest
        for unit, value in (("µs", total / count), ("launches a step", count / PROFILED))
    ]


def base_name(name: str) -> str:
    """A kernel's name without its return type, namespaces, template arguments and parameters, as Nsight Compute shows
    it.
    """
    plain = name.replace("(anonymous namespace)::", "")
    plain = re.sub(r"^\S*enable_if<.*?>::type ", "", plain)
    while (shorter := re.sub(r"<[^<>]*>", "", plain)) != plain:
        plain = shorter
    words = plain.partition("(")[0].split()
    return words[-1].rpartition("::")[2] if words else name


def counters(run: Run, shape: str) -> list[Figure]:
    """Means over the launches of each kernel in some steps of decode; or that there are none, and why."""
    program = next(filter(None, NCU), "")
    reason = "no device" if run.dry else unavailable(program)
    if reason:
        return [Figure(row=f"Nsight Compute: {reason}", unit="kernels counted", value=0)]
    return counted(program, model_of(run, shape))


def unavailable(program: str) -> str:
    """Why Nsight Compute can count nothing here; empty if it can. It is asked to count one kernel of torch's."""
    if not program:
        return "not installed"
    trial = "import torch; torch.ones(1 << 20, device='cuda').add_(1); torch.cuda.synchronize()"
    command = [program, "--clock-control", "none", "--metrics", next(iter(METRICS)), "--launch-count", "1"]
    try:
        done = subprocess.run(
            [*command, sys.executable, "-c", trial], capture_output=True, text=True, timeout=TRIAL_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {TRIAL_S} s"
    told = [line for line in (done.stdout + done.stderr).splitlines() if "==ERROR==" in line]
    return told[0].replace("==ERROR==", "").strip()[:120] if told else ""


def counted(program: str, model: Path) -> list[Figure]:
    """The kernels of the steps that `main` marks."""
    command = [
        program,
        "--csv",
        "--metrics",
        ",".join(METRICS),
        "--clock-control",
        "none",
        "--profile-from-start",
        "off",
    ]
    command += ["--launch-count", str(COUNTED), "--kill", "yes"]
    command += [sys.executable, "-W", "ignore", "-m", "tools.gpu.counters", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    rows = list(csv.DictReader(line for line in done.stdout.splitlines() if line.startswith('"')))
    if not rows:
        raise RuntimeError(f"nothing was counted: {(done.stdout + done.stderr)[-400:]}")
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        values[base_name(row["Kernel Name"]), row["Metric Name"]].append(float(row["Metric Value"].replace(",", "")))
    return [
        Figure(row=f"{model.name}, {STREAMS} streams, {name}", unit=METRICS[metric], value=sum(each) / len(each))
        for (name, metric), each in values.items()
    ]


def main() -> None:
    """Decode without graphs, and let the profiler see decode alone."""
    with mock.patch.object(DeviceBackend, "warm_up"):
        core = EngineCore(
            EngineConfig(
                model=sys.argv[1], device="cuda", max_num_seqs=STREAMS, max_model_len=2048, speculative_tokens=0,
                max_step_ms=0, prefix_caching=False,
            )
        )  # fmt: skip
    decoding(core, STREAMS, PROMPT, torch.cuda.cudart().cudaProfilerStart)
    torch.cuda.cudart().cudaProfilerStop()
    core.close()


if __name__ == "__main__":
    main()
