"""Tests and measures everything that needs a CUDA device, the most valuable first, and prints one table.

    python -m tools.gpu.campaign [--results FILE] [--parts NAME ...] [--budget-s SECONDS] [--dry] [--table]

Each part is a process of its own with 90 seconds. What it finds is written as it comes; another call, with the same
file, measures only what is missing. A dry run executes every part without a device, at tiny shapes: in Triton's
interpreter, or on a device that computes nothing.

Exit status 0: the file has everything. 1: something failed or is missing; the next call continues. 3: no device that
can be used, or it went away.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tools.gpu.device import DRY, Unusable, look
from tools.gpu.results import Results, commits, devices, table

if TYPE_CHECKING:
    from tools.gpu.device import Device

LIMIT_S = 90
LEAST_S = 30
"""Of a budget, for a part to be begun."""
PASSES = 3
"""How often a part that did not finish is begun again, if the budget allows."""
GIB = 1 << 30
MEMORY = Path("/dev/shm")
"""Where models are written if it has room: a file there is read at the speed of memory."""
NO_DEVICE = 3


@dataclass(frozen=True)
class Part:
    """A part: its module, the module's argument, and the GiB of device memory that it takes."""

    name: str
    module: str
    argument: str = ""
    needs_gib: int = 8

    @property
    def shape(self) -> str:
        """The model that it measures with; "" if it makes its own."""
        return next((word for word in self.argument.split() if word in SHAPES), "")


SHAPES = ("qwen2.5-0.5b", "llama-3.2-1b", "qwen2.5-3b", "qwen2.5-7b")
PARTS = (
    Part("tests", "suite"),
    Part("steps-0.5b", "steps", "qwen2.5-0.5b none", 16),
    Part("steps-7b", "steps", "qwen2.5-7b none", 40),
    Part("steps-7b-int8", "steps", "qwen2.5-7b int8", 40),
    Part("steps-0.5b-int8", "steps", "qwen2.5-0.5b int8", 16),
    Part("steps-3b", "steps", "qwen2.5-3b none", 24),
    Part("steps-1b", "steps", "llama-3.2-1b none", 24),
    Part("steps-3b-int8", "steps", "qwen2.5-3b int8", 24),
    Part("steps-1b-int8", "steps", "llama-3.2-1b int8", 24),
    Part("server", "server", "qwen2.5-0.5b", 16),
    Part("compiled-loop", "peers", "compiled qwen2.5-0.5b", 16),
    Part("generate-batch", "peers", "batching qwen2.5-0.5b", 16),
    Part("products", "kernels", "products"),
    Part("attention", "kernels", "attention"),
    Part("adapters", "kernels", "adapters"),
    Part("sampling", "sampling", "qwen2.5-0.5b", 16),
    Part("kernels", "counters", "times qwen2.5-0.5b", 16),
    Part("counters", "counters", "ncu qwen2.5-0.5b", 24),
    Part("soak-1", "soak", "1"),
    Part("soak-2", "soak", "2"),
)


def run_part(part: Part, results: Results, folder: Path, dry: bool, limit_s: float) -> tuple[int | None, float]:
    """The exit status, None for one that ran past its limit, and the seconds it took."""
    command = [sys.executable, "-W", "ignore", "-m", "tools.gpu.part", part.module, *filter(None, [part.argument])]
    command += ["--part", part.name, "--results", str(results.path), "--device", results.device]
    command += ["--commit", results.commit, "--folder", str(folder), *(["--dry"] if dry else [])]
    variables = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        **({"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "2"} if dry else {}),
    }
    begun = time.monotonic()
    with subprocess.Popen(command, env=variables, start_new_session=True) as process:
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    return status, time.monotonic() - begun


def _end(process: subprocess.Popen[bytes]) -> None:
    """With everything that it started; a server of it gets some seconds to stop its workers."""
    for number, patience_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
            deadline = time.monotonic() + patience_s
            while time.monotonic() < deadline:
                process.poll()
                os.killpg(process.pid, 0)  # raises once nobody is left
                time.sleep(0.05)
        except ProcessLookupError:
            return


def folder_for_models() -> Path:
    """In memory where 40 GiB are free there."""
    roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 40 * GIB
    return Path(tempfile.mkdtemp(prefix="dragoman-campaign-", dir=MEMORY if roomy else None))


def run(options: argparse.Namespace, results: Results, device: Device | None) -> int:
    """All parts; the exit status. `device`: as it was before the first."""
    calls = Calls(results, folder_for_models(), options.dry, time.monotonic() + options.budget_s, device)
    finished = set() if options.parts else results.finished()
    for name in sorted(finished):
        print(f"{name}: done before", flush=True)
    left = [part for part in PARTS if part.name not in finished and (not options.parts or part.name in options.parts)]
    status = 0
    try:
        for _ in range(PASSES):
            left = [part for part in left if not calls.finish(part)]
            if not any(calls.cut.get(part.name) for part in left):
                break
    except Unusable as reason:
        print(f"stopped: {reason}; what was found is in {results.path}", file=sys.stderr)
        status = NO_DEVICE
    finally:
        shutil.rmtree(calls.folder, ignore_errors=True)
    if left and not status:
        lines = [f"{part.name}: {calls.told.get(part.name, 'not begun')}" for part in left]
        print("missing, and measured by the next call:\n  " + "\n  ".join(lines), file=sys.stderr)
    return status or int(bool(left))


@dataclass
class Calls:
    """Runs parts one by one."""

    results: Results
    folder: Path
    dry: bool
    end: float
    device: Device | None
    told: dict[str, str] = field(default_factory=dict)
    """By part, why it is not finished."""
    cut: dict[str, bool] = field(default_factory=dict)
    """By part, whether time ended it."""

    def finish(self, part: Part) -> bool:
        """Run a part, and its model before it; returns whether nothing of it is missing. Raises Unusable if the
        device has gone.
        """
        if self.device is not None and self.device.free < part.needs_gib * GIB:
            free = f"{self.device.free / GIB:.1f} are free"
            return self._missing(part, f"needs {part.needs_gib} GiB of device memory, {free}")
        model = Part(f"model {part.shape}", "models", part.shape)
        if part.shape and not (self.folder / f"{part.shape}.complete").exists() and not self._ran(model):
            self.cut[part.name] = self.cut[model.name]
            return self._missing(part, f"its model was not made: {self.told[model.name]}")
        if not self._ran(part):
            return False
        self.results.finish(part.name)
        return True

    def _ran(self, part: Part) -> bool:
        left = min(LIMIT_S, self.end - time.monotonic())
        self.cut[part.name] = False
        if left < LEAST_S:
            return self._missing(part, "no time left")
        status, seconds = run_part(part, self.results, self.folder, self.dry, left)
        self.cut[part.name] = status is None
        if status == 0:
            print(f"{part.name}: done, {seconds:.0f} s", flush=True)
            return True
        word = {1: "with failures", None: f"not finished within {left:.0f} s"}.get(status, f"exit status {status}")
        self._missing(part, word)
        if self.device is not None:
            self.device = look()
        return False

    def _missing(self, part: Part, reason: str) -> bool:
        self.told[part.name] = reason
        print(f"{part.name}: {reason}", flush=True)
        return False


def described(device: Device) -> str:
    """The device and what runs on it: figures of different ones are kept apart."""
    versions = f"torch {device.torch} (CUDA {device.cuda}), Triton {device.triton}, transformers {device.transformers}"
    return f"{device.name}, {versions}"


def show(results: Results) -> None:
    """The table, and what failed."""
    entries = results.entries()
    print(f"\n{results.device}; commits {', '.join(commits(entries)) or 'none'}\n\n{table(entries)}")
    for entry in results.failures():
        print(f"\nfailed: {entry.part}, {entry.cell}: {entry.error}")


def commit() -> str:
    """Of the working tree; "unknown" where there is no repository."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def main() -> int:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("gpu-campaign.jsonl"))
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], metavar="NAME")
    parser.add_argument(
        "--budget-s", type=float, default=3600.0, help=f"in all; a part is not begun with under {LEAST_S} left"
    )
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--table", action="store_true", help="only print the table of the file, of every device in it")
    options = parser.parse_args()
    if options.table:
        for name in devices(options.results):
            show(Results(options.results, name, ""))
        return 0
    try:
        device = None if options.dry else look()
    except Unusable as reason:
        print(f"tools.gpu.campaign: {reason}", file=sys.stderr)
        return NO_DEVICE
    name = DRY if device is None else described(device)
    results = Results(options.results, name, commit())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a part that runs is ended, too
    status = run(options, results, device)
    show(results)
    return status


if __name__ == "__main__":
    sys.exit(main())
