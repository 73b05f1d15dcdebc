"""Counts requests whose answers are the same from one worker and from two, of which one computes the prompt and the other goes on.

    python -m tools.bench.equal_transfers [--model DIR] [--requests 500] [--transport sockets nixl] [--dtype auto] [--together 16]

Two worker processes. Each request goes first to one of them alone, then, under another salt, to both: its prompt's blocks go from the one to the
other by the transport, for every second request while they are computed. Equal are all tokens, log-probabilities (to the last bit), those of
the prompt, and the end. Requests are mixed: prompts of 1 to 400 tokens, of which a third begin alike; greedy and sampled with seeds; filters,
penalties, biases, bad words, stop tokens, log-probabilities, schemas, expressions and choices; the demo model's adapters. Needs no other
process; takes some minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import Any

from engine.adapters.files import content_digest
from engine.client import EngineClient
from engine.failures import FinishReason
from engine.kv_transfer.handle import KvSource, new_transfer_id
from engine.kv_transfer.messages import Fetch
from engine.messages import AdapterRef
from engine.sampling.params import Grammar, SamplingParams
from tests.models.random_models import DEMO
from tools.bench.kv_transfer import VOCABULARY, Worker

SHARED, LONGEST, BLOCK_SIZE = 64, 400, 16
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMARS = (
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("regex", r"[a-c]{3}-\d{2,4}"),
    Grammar("choice", '["a long choice", "a longer choice", "something else"]'),
)
Asked = tuple[list[int], SamplingParams, AdapterRef | None]
Said = tuple[list[Any], FinishReason | None, int | None]


def make_work(count: int, adapters: list[AdapterRef]) -> list[Asked]:
    """The requests, the same in every run."""
    rng = random.Random(1)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(number)]

    shared = tokens(SHARED)
    extras: list[dict[str, Any]] = [
        {},
        {"top_k": 30, "top_p": 0.9, "min_p": 0.01},
        {"typical_p": 0.8},
        {"repetition_penalty": 1.4, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"relative_frequency_penalty": 1.0, "watermark": True},
        {"logit_bias": {shared[0]: 4.0}, "allowed_token_ids": shared[:20], "bad_words": [shared[:2]]},
        {"allowed_token_ids": shared[:10], "stop_token_ids": shared[3:4], "min_tokens": 3},
        {"prompt_logprobs": 1},
    ]
    work: list[Asked] = []
    for number in range(count):
        prompt = (shared if number % 3 == 0 else []) + tokens(
            rng.choice([rng.randint(1, 40), rng.randint(40, LONGEST - SHARED)])
        )
        more = dict(rng.choice(extras))
        if number % 5 == 0:
            more = {"grammar": rng.choice(GRAMMARS)}
        elif rng.random() < 0.7:
            more["ignore_eos"] = True
        params = SamplingParams(
            max_tokens=rng.randint(2, 48), temperature=rng.choice([0.0, 0.8, 1.2]), seed=rng.getrandbits(63), logprobs=rng.randrange(4),
            logprobs_mode=rng.choice(["raw", "processed"]), **more,
        )  # fmt: skip
        work.append((prompt, params, rng.choice([None, *adapters])))
    return work


async def answer(client: EngineClient, asked: Asked, **more: Any) -> tuple[Said, KvSource | None]:
    """What one worker says, and where it holds the blocks."""
    prompt, params, adapter = asked
    said: list[Any] = []
    async with aclosing(client.generate(prompt, params, adapter=adapter, **more)) as outputs:
        async for output in outputs:
            if output.error is not None:
                raise SystemExit(f"a request was refused: {output.error}")
            for entry in (*(output.prompt_logprobs or []), *(output.logprobs or [])):
                said.append((entry.token_id, entry.logprob.hex(), entry.rank, entry.top))
    return (said, output.finish_reason, output.stop_token_id), output.source


async def both(clients: list[EngineClient], number: int, asked: Asked, address: str) -> Said:
    """What two workers say; the first one's tokens are those of its log-probabilities behind the prompt's."""
    prompt, params, adapter = asked
    salt, name = f"both {number}", new_transfer_id()
    if number % 2:
        source = KvSource(address, "a", 1, name, len(prompt), BLOCK_SIZE)
        clients[1].fetch(Fetch(source, prompt, adapter.digest if adapter else "", salt))
    first, source = await answer(clients[0], asked, hold=name, cache_salt=salt)
    if source is None:  # it ended with its first token
        return first
    said, reason, _ = first
    assert reason is FinishReason.MOVED
    generated = [entry[0] for entry in said[len(prompt) - 1 if params.prompt_logprobs is not None else 0 :]]
    rest, _ = await answer(clients[1], asked, generated=generated, source=source, cache_salt=salt)
    return said + rest[0], rest[1], rest[2]


async def compare(asked: argparse.Namespace, transport: str, folder: Path, work: list[Asked]) -> None:
    """Print one row."""
    workers = [Worker(asked.model, folder, name, kv_transport=transport, dtype=asked.dtype) for name in ("a", "b")]
    try:
        clients = [await worker.connect() for worker in workers]
        places = asyncio.Semaphore(asked.together)
        unequal: list[int] = []
        kinds: Counter[str] = Counter()

        async def one(number: int) -> None:
            async with places:
                alone, _ = await answer(clients[number % 2], work[number], cache_salt=f"alone {number}")
                if alone != await both(clients, number, work[number], workers[0].address):
                    unequal.append(number)
                kinds[str(alone[1])] += 1

        await asyncio.gather(*(one(number) for number in range(len(work))))
        await asyncio.sleep(2)  # the last reports
        kv = clients[1].stats.kv
        assert kv is not None
        failures = ", ".join(f"{count} {code}" for code, count in kv.failures.items()) or "none"
        print(
            f"| {transport} | {len(work)} | {len(work) - len(unequal)} | {kv.fetched_blocks} | {failures} |", flush=True
        )
        print(f"ends: {dict(kinds)}; unequal: {sorted(unequal)}", flush=True)
        for client in clients:
            await client.close()
    finally:
        for worker in workers:
            worker.end()


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--transport", nargs="+", default=["sockets"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--together", type=int, default=16)
    asked = parser.parse_args()
    beside = Path(asked.model).parent / "demo-adapters"
    paths = (
        sorted(path for path in beside.iterdir() if path.is_dir())
        if Path(asked.model) == DEMO and beside.is_dir()
        else []
    )
    work = make_work(asked.requests, [AdapterRef(content_digest(path), str(path)) for path in paths])
    print("| transport | requests | equal | blocks fetched | failed transfers |\n| --- | --- | --- | --- | --- |")
    for transport in asked.transport:
        with tempfile.TemporaryDirectory(prefix="dragoman-equal-") as folder:
            asyncio.run(compare(asked, transport, Path(folder), work))


if __name__ == "__main__":
    main()
