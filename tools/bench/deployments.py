"""Measures what separate processes cost at rest, and how long a sleeping deployment takes to answer.

    python -m tools.bench.deployments

It starts `reconcile` and `web` on loopback with the demo model and prints a table: resident memory and CPU share of both while
idle; the first token of a request that wakes a deployment, beside the same worker's start as the reconciler logs it; and how many
of fifty requests at once were lost.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

import httpx
import psutil

from config.installation import DEMO_MODEL, ROOT

IDLE_S = 20.0
ROUNDS = 3
BURST = 50
START_S = 180.0
PORTS = (
    "FRONT_PORT", "CONTROL_PORT", "MINDIE_PORT", "MINDIE_MANAGEMENT_PORT", "MINDIE_METRICS_PORT", "GRPC_PORT", "DJL_PORT",
    "TORCHSERVE_GRPC_INFERENCE_PORT", "TORCHSERVE_GRPC_MANAGEMENT_PORT",
)  # fmt: skip


def free_port() -> str:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


class Processes:
    """A reconciler and a web process with data of their own."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self.environment = {
            **os.environ,
            "DRAGOMAN_DATA_DIR": str(folder),
            "DRAGOMAN_RUNTIME_DIR": str(folder / "run"),
            "DRAGOMAN_LOG_FORMAT": "json",
            **{f"DRAGOMAN_{name}": free_port() for name in PORTS},
        }
        self.url = f"http://127.0.0.1:{self.environment['DRAGOMAN_FRONT_PORT']}"

    def start(self, command: str) -> subprocess.Popen[bytes]:
        """Start a process that runs until it is stopped."""
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-W", "ignore", "manage.py", command],
                cwd=ROOT,
                env=self.environment,
                stdout=log,
                stderr=log,
            )

    def manage(self, *arguments: str) -> str:
        """Run a management command."""
        command = [sys.executable, "-W", "ignore", "manage.py", *arguments]
        return subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=True
        ).stdout

    def until(self, text: str) -> None:
        """Wait until the log has this text."""
        deadline = time.monotonic() + START_S
        while text not in self.log.read_text():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {text!r} in {self.log}")
            time.sleep(0.1)

    def until_asleep(self) -> None:
        """Wait until the deployment has no workers."""
        while any(row["workers"] for row in json.loads(self.manage("status", "--json"))["deployments"]):
            time.sleep(0.5)

    def starts_s(self) -> list[float]:
        """Seconds from launch to readiness of each worker, as logged."""
        launched: list[datetime] = []
        found = []
        for line in self.log.read_text().splitlines():
            if '"worker launched"' in line:
                launched.append(datetime.fromisoformat(json.loads(line)["timestamp"].replace("Z", "+00:00")))
            elif '"worker ready"' in line:
                ready = datetime.fromisoformat(json.loads(line)["timestamp"].replace("Z", "+00:00"))
                found.append((ready - launched[-1]).total_seconds())
        return found


def idle(process: subprocess.Popen[bytes]) -> tuple[float, float]:
    """MiB resident, and percent of a CPU over IDLE_S."""
    seen = psutil.Process(process.pid)
    before = sum(seen.cpu_times()[:2])
    time.sleep(IDLE_S)
    return seen.memory_info().rss / 2**20, (sum(seen.cpu_times()[:2]) - before) / IDLE_S * 100


async def burst(url: str, count: int) -> tuple[int, float, float]:
    """Lost requests, and seconds to the first and to the last first token."""
    begin = time.monotonic()
    body = {"model": "sleeper", "prompt": "The capital of France", "max_tokens": 8, "stream": True}

    async def one(client: httpx.AsyncClient) -> float | None:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            first = None
            text = b""
            async for part in answer.aiter_bytes():
                if first is None and b'"text"' in part:
                    first = time.monotonic() - begin
                text += part
            return first if text.rstrip().endswith(b"[DONE]") else None

    async with httpx.AsyncClient(timeout=START_S, limits=httpx.Limits(max_connections=count)) as client:
        results = await asyncio.gather(*(one(client) for _ in range(count)), return_exceptions=True)
    times = [each for each in results if isinstance(each, float)]
    return count - len(times), min(times, default=0.0), max(times, default=0.0)


def main() -> None:
    """Run all measurements and print the table."""
    with tempfile.TemporaryDirectory(prefix="dragoman-bench-") as name:
        processes = Processes(Path(name))
        reconciler = processes.start("reconcile")
        processes.until("this reconciler leads")
        web = processes.start("web")
        try:
            processes.manage(
                "deploy", str(DEMO_MODEL), "--name", "sleeper", "--min-workers", "0", "--scale-to-zero",
                "--idle-timeout-s", "1", "--wait", str(START_S),
            )  # fmt: skip
            rows = []
            for count in [1] * ROUNDS + [BURST]:
                processes.until_asleep()
                rows.append((count, *asyncio.run(burst(processes.url, count)), processes.starts_s()[-1]))
            processes.until_asleep()
            print("| process, idle | MiB | % of a CPU |\n| --- | --- | --- |")
            for title, process in (("reconcile", reconciler), ("web", web)):
                memory, cpu = idle(process)
                print(f"| {title} | {memory:.0f} | {cpu:.1f} |")
            print("\n| requests that wake | lost | first token s | last first token s | worker's start s | ratio |")
            print("| --- | --- | --- | --- | --- | --- |")
            for count, lost, first, last, start in rows:
                print(f"| {count} | {lost} | {first:.2f} | {last:.2f} | {start:.2f} | {first / start:.2f} |")
            ratios = [first / start for count, _, first, _, start in rows if count == 1]
            print(f"\nmedian ratio of one request: {statistics.median(ratios):.2f}")
        finally:
            for process in (web, reconciler):
                process.send_signal(signal.SIGTERM)
                process.wait()


if __name__ == "__main__":
    main()
