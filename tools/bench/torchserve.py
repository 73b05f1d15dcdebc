"""Measures the web process: CPU time per message of TorchServe's streams, and per prediction, as ratios to a bare gRPC server
in the same run.

    python -m tools.bench.torchserve [--rounds 3]

The floor is grpc.aio with handlers that only make the messages, at the pace of an engine. The engine is another process and does
not count.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import psutil

from inference.dialects.torchserve.protocol import inference_pb2 as pb
from loadtests.server import free_port, running_server
from tools.bench.web import cpu_s

ROOT = Path(__file__).resolve().parents[2]
SERVICE = "org.pytorch.serve.grpc.inference.InferenceAPIsService"
STREAMS, TOKENS, CALLS, AT_ONCE = 32, 128, 480, 16
TICK_S = 0.02
VALUES = {"data": b"Once upon a time", "ignore_eos": b"true", "temperature": b"0"}


async def serve_floor(port: int) -> None:
    """The bare server, until it is ended."""

    async def predict(request: Any, context: Any) -> Any:
        return pb.PredictionResponse(prediction=b" word")

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        for _ in range(TOKENS):
            await asyncio.sleep(TICK_S)
            yield pb.PredictionResponse(prediction=b" word")

    kinds = {"Predictions": (grpc.unary_unary_rpc_method_handler, predict),
             "StreamPredictions": (grpc.unary_stream_rpc_method_handler, stream)}  # fmt: skip
    handlers = {
        name: make(handler, pb.PredictionsRequest.FromString, pb.PredictionResponse.SerializeToString)
        for name, (make, handler) in kinds.items()
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


async def per_message_us(channel: grpc.aio.Channel, process: psutil.Process) -> float:
    """CPU microseconds per message over 32 streams."""
    call = channel.unary_stream(
        f"/{SERVICE}/StreamPredictions", pb.PredictionsRequest.SerializeToString, pb.PredictionResponse.FromString
    )
    request = pb.PredictionsRequest(model_name="demo", input={**VALUES, "max_tokens": b"%d" % TOKENS})

    async def count() -> int:
        return sum([1 async for _ in call(request)])

    before = cpu_s(process)
    counts = await asyncio.gather(*(count() for _ in range(STREAMS)))
    return (cpu_s(process) - before) * 1e6 / sum(counts)


async def per_call_us(channel: grpc.aio.Channel, process: psutil.Process) -> float:
    """CPU microseconds per prediction, 16 at once."""
    call = channel.unary_unary(
        f"/{SERVICE}/Predictions", pb.PredictionsRequest.SerializeToString, pb.PredictionResponse.FromString
    )
    request = pb.PredictionsRequest(model_name="demo", input={**VALUES, "max_tokens": b"1"})

    async def repeat() -> None:
        for _ in range(CALLS // AT_ONCE):
            await call(request)

    before = cpu_s(process)
    await asyncio.gather(*(repeat() for _ in range(AT_ONCE)))
    return (cpu_s(process) - before) * 1e6 / CALLS


async def measure(rounds: int, servers: dict[str, tuple[int, psutil.Process]]) -> None:
    """All in turn, the floor before ours; medians."""
    results: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for name, (port, process) in servers.items():
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                await asyncio.wait_for(channel.channel_ready(), 60)
                results.setdefault(("message", name), []).append(await per_message_us(channel, process))
                results.setdefault(("prediction", name), []).append(await per_call_us(channel, process))
    print("| per | µs | of the floor's |\n| --- | --- | --- |")
    for kind in ("message", "prediction"):
        ours, floor = (statistics.median(results[kind, name]) for name in ("ours", "floor"))
        print(f"| {kind} | {ours:.0f} | {ours / floor:.2f} |")


def main() -> None:
    """Start both servers, measure in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--floor", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.floor:
        asyncio.run(serve_floor(options.floor))
        return
    floor_port, port = free_port(), free_port()
    command = [sys.executable, "-W", "ignore", "-m", "tools.bench.torchserve", "--floor", str(floor_port)]
    floor = subprocess.Popen(command, cwd=ROOT)
    try:
        with running_server({"TORCHSERVE_GRPC_INFERENCE_PORT": str(port)}):
            ours = next(child for child in psutil.Process().children() if "serve" in child.cmdline())
            servers = {"floor": (floor_port, psutil.Process(floor.pid)), "ours": (port, ours)}
            asyncio.run(measure(options.rounds, servers))
    finally:
        floor.terminate()
        floor.wait()


if __name__ == "__main__":
    main()
