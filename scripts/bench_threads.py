"""Measures the engine on one and on several threads, alone and beside a process that keeps one core busy.

    python -m scripts.bench_threads [--model DIR ...] [--threads 1 2] [--streams 1 8 32] [--rounds 5] [--against CHECKOUT]
                                    [--json FILE]

A worker process loads the model once and repeats the same work: a number of sequences, each with a prompt of its own and a
fixed number of output tokens. The workers take turns, with and without the busy process; cells are medians over the rounds.
`--against` measures another checkout of this project in the same turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.messages import Submit
from engine.sampling.params import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "models" / "demo"
VOCABULARY = 1500  # ids that every model here has
BUSY = "while True: pass"


def worker(model: str, threads: int) -> None:
    """Answer lines {streams, prompt, output} on stdin with lines {prefill, decode}, in tokens per second."""
    with suppress(ImportError):  # another checkout's may set none
        from engine.__main__ import SPIN_COUNT

        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    from engine.core import EngineCore

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    core = EngineCore(
        EngineConfig(model=model, threads=threads, speculative_tokens=0, prefix_caching=False, kv_cache_bytes=1 << 29)
    )
    print("ready", file=answers, flush=True)
    number = 0
    for line in sys.stdin:
        work = json.loads(line)
        rng = random.Random(1)
        missing = set()
        for _ in range(work["streams"]):
            number += 1
            missing.add(number)
            prompt = [rng.randrange(3, VOCABULARY) for _ in range(work["prompt"])]
            params = SamplingParams(max_tokens=work["output"], temperature=0.0, ignore_eos=True)
            core.submit(1, Submit(number, prompt, params))
        begin, decoded, prefilled = time.perf_counter(), 0, 0.0
        while core.has_work:
            for outputs in core.step().values():
                for output in outputs:
                    missing.discard(output.request_id)
                    decoded += len(output.token_ids) if prefilled else 0
            if not missing and not prefilled:
                prefilled = time.perf_counter() - begin
        spent = time.perf_counter() - begin - prefilled
        speeds = {"prefill": work["streams"] * work["prompt"] / prefilled, "decode": decoded / spent}
        print(json.dumps(speeds), file=answers, flush=True)


class Worker:
    """A worker process of one checkout."""

    def __init__(self, checkout: Path, model: Path, threads: int) -> None:
        here = f"import sys; sys.path[:0] = [{str(checkout)!r}, {str(ROOT)!r}]; "
        code = here + f"import runpy; sys.argv = {['', '--worker', str(model), '--threads', str(threads)]!r}; "
        code += f"runpy.run_path({str(Path(__file__))!r}, run_name='__main__')"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=checkout,
        )  # fmt: skip
        self.line()

    def line(self) -> str:
        """The next line that it says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a worker ended")
        return line

    def run(self, work: dict[str, int]) -> dict[str, float]:
        """Tokens per second of one piece of work."""
        assert self.process.stdin is not None
        print(json.dumps(work), file=self.process.stdin, flush=True)
        speeds: dict[str, float] = json.loads(self.line())
        return speeds

    def stop(self) -> None:
        """Its input ends, and so does it."""
        self.process.communicate()


def measure(model: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each phase and number of streams, checkout, threads and neighbour: its median and all that was seen."""
    checkouts = {"this": ROOT, **({"other": Path(args.against).resolve()} if args.against else {})}
    workers = {
        (name, threads): Worker(checkout, model, threads)
        for name, checkout in checkouts.items()
        for threads in args.threads
    }
    seen: dict[tuple[str, int, str, int, bool], list[float]] = {}
    try:
        for turn in range(args.rounds + 1):  # the first warms up
            for busy in (False,) if args.idle else (False, True):
                neighbour = subprocess.Popen([sys.executable, "-c", BUSY]) if busy else None
                try:
                    for streams in args.streams:
                        work = {"streams": streams, "prompt": args.prompt, "output": args.output}
                        for (name, threads), one in workers.items():
                            for phase, speed in one.run(work).items():
                                if turn:
                                    seen.setdefault((phase, streams, name, threads, busy), []).append(speed)
                finally:
                    if neighbour is not None:
                        neighbour.kill()
                        neighbour.wait()
    finally:
        for one in workers.values():
            one.stop()
    return [
        {"model": model.name, "phase": phase, "streams": streams, "checkout": name, "threads": threads, "busy": busy,
         "tokens_per_s": round(statistics.median(speeds), 1), "all": [round(speed, 1) for speed in speeds]}
        for (phase, streams, name, threads, busy), speeds in seen.items()
    ]  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each phase and number of streams; beside each speed its part of what one thread gives alone."""
    columns = list(dict.fromkeys((row["checkout"], row["threads"], row["busy"]) for row in rows))
    columns.sort(key=lambda column: (column[0] != "this", column[2], column[1]))
    head = [f"{name}, {threads} thr.{', busy' if busy else ''}" for name, threads, busy in columns]
    lines = ["| model | phase | streams | " + " | ".join(head) + " |", "|---" * (3 + len(head)) + "|"]
    for model, phase, streams in dict.fromkeys((row["model"], row["phase"], row["streams"]) for row in rows):
        cells = {
            (row["checkout"], row["threads"], row["busy"]): row["tokens_per_s"]
            for row in rows
            if (row["model"], row["phase"], row["streams"]) == (model, phase, streams)
        }
        texts = []
        for column in columns:
            alone = cells.get((column[0], 1, False))
            texts.append(f"{cells[column]:.0f}" + (f" ({cells[column] / alone:.2f})" if alone else ""))
        lines.append(f"| {model} | {phase} | {streams} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def main() -> None:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--model", nargs="+", default=[str(DEMO), "smollm2-135m"], help="directories, or random shapes")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=256, help="output tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--idle", action="store_true", help="without the neighbour alone")
    parser.add_argument("--against", help="another checkout")
    parser.add_argument("--json", help="where all numbers go")
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.threads[0])
        return
    from scripts.random_models import REAL, make_model  # loads torch, which workers do after they set its environment

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.model:
            rows += measure(make_model(Path(folder), name) if name in REAL else Path(name), args)
            print(table(rows), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
