"""OpenVINO GenAI's continuous batching behind /v1/completions and /health, as thin as it can be.

It runs in OpenVINO's own environment and imports nothing of this project. Prompts are token ids, answers are streams with
one event a token.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from aiohttp import web
from tokenizers import Tokenizer

MAX_BATCHED_TOKENS = 2048


class Engine:
    """Steps the pipeline on the event loop's own thread and hands new tokens to their requests.

    A step holds the interpreter's lock: with a thread of its own, answers would only queue up behind the next step.
    Without requests it sleeps.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = options.cache_gib
        scheduler.max_num_seqs = options.max_sequences
        scheduler.max_num_batched_tokens = MAX_BATCHED_TOKENS
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": options.threads, "INFERENCE_PRECISION_HINT": options.precision}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(options.model), scheduler, "CPU", properties)
        self._wake = asyncio.Event()
        self._live: dict[int, tuple[Any, asyncio.Queue[tuple[list[int], bool]]]] = {}
        self._numbers = itertools.count()

    def submit(self, prompt: list[int], tokens: int) -> asyncio.Queue[tuple[list[int], bool]]:
        """Start a request; its queue gets new tokens, and whether they are the last."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        number = next(self._numbers)
        queue: asyncio.Queue[tuple[list[int], bool]] = asyncio.Queue()
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        self._live[number] = (self._pipeline.add_request(number, ids, config), queue)
        self._wake.set()
        return queue

    async def run(self) -> None:
        """Step while there are requests."""
        running = openvino_genai.GenerationStatus.RUNNING
        while True:
            if not self._live:
                self._wake.clear()
                await self._wake.wait()
            for _ in range(3):  # what waits to be read, woken and written comes first
                await asyncio.sleep(0)
            self._pipeline.step()
            for number, (handle, queue) in list(self._live.items()):
                ended = handle.get_status() != running
                tokens: list[int] = []
                while handle.can_read():
                    for piece in handle.read().values():
                        tokens.extend(piece.generated_ids)
                if tokens or ended:
                    queue.put_nowait((tokens, ended))
                if ended:
                    del self._live[number]


class Service:
    """The two routes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        vocabulary = Tokenizer.from_file(str(options.model / "tokenizer.json")).get_vocab()
        self._texts = {number: token.replace("\u0120", " ") for token, number in vocabulary.items()}

    async def start(self, application: web.Application) -> None:
        """Load the model on the loop that serves."""
        self._engine = Engine(self._options)
        self._task = asyncio.create_task(self._engine.run())

    async def health(self, request: web.Request) -> web.Response:
        """It answers only when the model is loaded."""
        return web.Response(text="ok")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Stream a greedy answer of exactly `max_tokens` tokens."""
        body = await request.json()
        queue = self._engine.submit(body["prompt"], int(body["max_tokens"]))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        count, ended = 0, False
        while not ended:
            tokens, ended = await queue.get()
            count += len(tokens)
            events = [self._event(self._texts.get(token, ""), None) for token in tokens]
            if ended:
                usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
                events += [self._event("", "length", usage=usage), "data: [DONE]\n\n"]
            await response.write("".join(events).encode())
        await response.write_eof()
        return response

    def _event(self, text: str, reason: str | None, **more: Any) -> str:
        choice = {"index": 0, "text": text, "finish_reason": reason}
        event = {"id": "cmpl", "object": "text_completion", "model": self._options.name, "choices": [choice], **more}
        return f"data: {json.dumps(event)}\n\n"


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--precision", choices=["bf16", "f32"], required=True)
    parser.add_argument("--cache-gib", type=int, required=True)
    parser.add_argument("--max-sequences", type=int, required=True)
    options = parser.parse_args()
    service = Service(options)
    application = web.Application(client_max_size=1 << 26)
    application.router.add_post("/v1/completions", service.completions)
    application.router.add_get("/health", service.health)
    application.on_startup.append(service.start)
    web.run_app(application, host="127.0.0.1", port=options.port, print=None)


if __name__ == "__main__":
    main()
