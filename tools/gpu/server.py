"""The part `server`: the whole server on the device, streaming over HTTP to many clients at once."""

from __future__ import annotations

import asyncio
import functools
from contextlib import ExitStack
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from loadtests.server import running_server
from tools.bench.server import server_run
from tools.gpu.models import TINY_LENGTH, model_of
from tools.gpu.results import Figure
from tools.gpu.steps import prompts_of

if TYPE_CHECKING:
    from tools.gpu.part import Run

STREAMS = (32, 128, 1, 256)
LENGTH = 2048
"""Of the longest sequence; for longer ones more graphs are captured at the start."""
START_TIMEOUT_S = 60.0
"""So that what the server says is told before the part ends."""


def run(run: Run) -> None:
    """A cell for each number of streams."""
    streams, length, tokens = ((1, 3), 24, 8) if run.dry else (STREAMS, 128, 200)
    place = {"DEVICE": "cpu", "DTYPE": "float32"} if run.dry else {"DEVICE": "cuda"}
    with ExitStack() as stack:

        @functools.cache
        def port() -> int:
            settings = {
                "MODEL": str(model_of(run, run.argument)),
                "SPECULATIVE_TOKENS": "0",
                "MAX_NUM_SEQS": str(max(streams)),
                "MAX_MODEL_LEN": str(TINY_LENGTH if run.dry else LENGTH),
            }
            return urlsplit(stack.enter_context(running_server({**settings, **place}, START_TIMEOUT_S))).port or 0

        def cell(count: int) -> list[Figure]:
            # The prefix cache must know none of the prompts.
            asyncio.run(server_run(port(), prompts_of(count, length, seed=2 * count), 4))
            measured = server_run(port(), prompts_of(count, length, seed=2 * count + 1), tokens)
            rate, ttft_ms, gap_ms = asyncio.run(measured)
            row = f"{run.argument} over HTTP"
            return [
                Figure(row=row, unit="tokens/s", value=rate, column=count),
                Figure(row=row, unit="TTFT ms, median", value=ttft_ms, column=count),
                Figure(row=row, unit="inter-token ms, median", value=gap_ms, column=count),
            ]

        for count in streams:
            run.measure(f"{count} streams", functools.partial(cell, count))
