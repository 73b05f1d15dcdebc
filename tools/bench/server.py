"""Measures the engine alone and the whole server on the same work, in turn, and prints both with their ratio.

    python -m tools.bench.server [--model DIR ...] [--streams 1 8 32] [--rounds 2] [--json FILE]

The engine alone is a worker process driven over its socket with token ids; the server is `manage.py serve` driven
over HTTP with the same ids, streaming. A cell is a number of concurrent streams, each with a prompt of its own and a fixed
number of output tokens. The floor of a cell is measured in the same run: prefill at the speed of matrix products, decode at
that speed or at the bandwidth of reading the weights once, whichever is slower. Speculation is off, because models with
random weights repeat themselves and would accept too many draft tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from safetensors import safe_open

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.sampling.params import SamplingParams
from loadtests.server import running_server
from management.launchers.local import LocalLauncher
from tests.models.random_models import DEMO, make_model
from tools.bench.sse_client import post

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCABULARY = 1500  # ids that every model here has


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Prompts without a common prefix."""
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCABULARY) for _ in range(length)] for _ in range(count)]


async def engine_run(client: EngineClient, work: list[list[int]], output_tokens: int) -> float:
    """Output tokens per second of the engine alone."""

    async def one(prompt: list[int]) -> int:
        params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        count = 0
        async for output in client.generate(prompt, params):
            if output.error is not None:
                raise RuntimeError(f"a stream failed: {output.error}")
            count += len(output.token_ids)
        return count

    start = time.perf_counter()
    tokens = sum(await asyncio.gather(*(one(prompt) for prompt in work)))
    return tokens / (time.perf_counter() - start)


async def server_run(port: int, work: list[list[int]], output_tokens: int) -> tuple[float, float, float]:
    """Output tokens per second of the whole server; median time to first token and between tokens in ms."""

    def body(prompt: list[int]) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True, "stream": True}

    start = time.perf_counter()
    streams = await asyncio.gather(*(post(port, "/v1/completions", body(prompt)) for prompt in work))
    elapsed = time.perf_counter() - start
    if any(b"data: [DONE]" not in stream.tail or b'"error"' in stream.tail for stream in streams):
        raise RuntimeError("a stream failed")
    gaps = [gap for stream in streams for gap in stream.gaps_s]
    ttft = statistics.median(stream.ttft_s for stream in streams)
    return len(work) * output_tokens / elapsed, ttft * 1e3, statistics.median(gaps) * 1e3


@contextmanager
def engine_worker(model: Path, dtype: str, threads: int = 0, **options: Any) -> Iterator[EngineConfig]:
    """A worker process of its own, with further options of the engine."""
    launcher = LocalLauncher()
    config = EngineConfig(
        model=str(model),
        dtype=dtype,
        worker_id="bench",
        address=launcher.address("bench"),
        speculative_tokens=0,
        threads=threads,
        **options,
    )
    worker = launcher.launch(config)
    try:
        while not any(status.state == "ready" for status in worker.statuses()):
            if worker.exit_code() is not None:
                raise RuntimeError("the worker did not start")
            time.sleep(0.1)
        yield config
    finally:
        launcher.close()


def read_bandwidth() -> float:
    """Bytes per second of reading memory, the best of five sums over 256 MiB."""
    data = torch.ones(64 << 20)
    best = 1e9
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - start)
    return data.numel() * 4 / best


def product_rate(dtype: torch.dtype) -> float:
    """Floating-point operations per second of a matrix product in torch, the best of five."""
    a, b = torch.randn(1024, 2048).to(dtype), torch.randn(4096, 2048).to(dtype)
    best = 1e9
    for _ in range(5):
        start = time.perf_counter()
        torch.nn.functional.linear(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * a.numel() * b.shape[0] / best


def weights(model: Path) -> tuple[int, int]:
    """How many numbers are read in a decode step, and how many a prompt's token is multiplied with."""
    every = embedded = 0
    for file in model.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                size = torch.Size(tensors.get_slice(name).get_shape()).numel()
                every += size
                embedded += size if "embed" in name or "lm_head" in name else 0
    return every, every - embedded


def floor_rate(model: Path, dtype: str, streams: int, options: argparse.Namespace) -> float:
    """Output tokens per second that the machine allows, attention and everything small left out."""
    kind = getattr(torch, dtype)
    every, inner = weights(model)
    operations = product_rate(kind)
    prompts_s = streams * options.prompt_tokens * 2 * inner / operations
    step_s = max(every * kind.itemsize / read_bandwidth(), streams * 2 * every / operations)
    return streams * options.output_tokens / (prompts_s + options.output_tokens * step_s)


async def measure(model: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All cells of one model: engine and server alternate, medians over the rounds."""
    rows = []
    with (
        running_server({"MODEL": str(model), "DTYPE": options.dtype, "SPECULATIVE_TOKENS": "0"}) as url,
        engine_worker(model, options.dtype) as config,
    ):
        port = urlsplit(url).port or 0
        client = EngineClient(config.address, config.worker_id, config.epoch)
        info = await client.connect()
        for streams in options.streams:
            engine, server = [], []
            for number in range(options.rounds + 1):
                work = prompts(streams, options.prompt_tokens, seed=1000 * streams + number)
                tokens = options.output_tokens if number else 4
                if number % 2:  # each goes first in turn
                    alone = await engine_run(client, work, tokens)
                    whole = await server_run(port, work, tokens)
                else:
                    whole = await server_run(port, work, tokens)
                    alone = await engine_run(client, work, tokens)
                if number:  # the first round warms up
                    engine.append(alone)
                    server.append(whole)
            rows.append(
                {
                    "model": model.name,
                    "dtype": info.dtype,
                    "streams": streams,
                    "engine_tokens_per_s": statistics.median(engine),
                    "server_tokens_per_s": statistics.median(s[0] for s in server),
                    "ratio": statistics.median(s[0] / e for s, e in zip(server, engine, strict=True)),
                    "ttft_ms": statistics.median(s[1] for s in server),
                    "inter_token_ms": statistics.median(s[2] for s in server),
                    "floor_tokens_per_s": floor_rate(model, info.dtype, streams, options),
                }
            )
            print(line(rows[-1]), flush=True)
        await client.close()
    return rows


HEAD = """| model | dtype | streams | engine tok/s | server tok/s | server / engine | TTFT ms | inter-token ms | floor tok/s |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    return (
        f"| {row['model']} | {row['dtype']} | {row['streams']} | {row['engine_tokens_per_s']:.1f} "
        f"| {row['server_tokens_per_s']:.1f} | {row['ratio']:.3f} | {row['ttft_ms']:.0f} "
        f"| {row['inter_token_ms']:.1f} | {row['floor_tokens_per_s']:.0f} |"
    )


def machine() -> dict[str, Any]:
    """What it ran on."""
    model = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), ""
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "amx": torch.cpu._is_amx_tile_supported(),
        "torch": torch.__version__,
    }


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model",
        nargs="+",
        default=["smollm2-135m", "qwen2.5-0.5b", "qwen3-0.6b"],
        help="Directories, or names of random models to make.",
    )
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(json.dumps(machine()))
    print(HEAD, flush=True)
    rows = []
    with tempfile.TemporaryDirectory(prefix="dragoman-bench-") as folder:
        for name in options.model:
            model = Path(name) if Path(name).is_dir() else DEMO if name == "demo" else make_model(Path(folder), name)
            rows += asyncio.run(measure(model, options))
    if options.json:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        record = {
            "commit": commit.stdout.strip(),
            "machine": machine(),
            "streams": options.streams,
            "rounds": options.rounds,
            "rows": rows,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
