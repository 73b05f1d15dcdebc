"""Loads, replaces and unloads many adapters while clients use them, and counts lost requests and wrong answers.

    python -m tools.bench.churn_adapters [--adapters 100] [--clients 4]

It makes random adapters whose greedy answers differ, starts `serve` with the demo model, and asks for each answer once, alone.
Then clients ask adapters at random and compare each answer with that, while others come, are replaced by other content, go
and come back, in turn by vLLM's and DJL Serving's calls. A request that begins before a replacement may be answered by
either content; one that begins before its adapter is unloaded must be answered.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from config.installation import DEMO_MODEL, ROOT
from tests.models.adapters import make_adapter
from tools.bench.deployments import PORTS, free_port

START_S = 180.0
TOKENS = 12
STRENGTH = 120.0
"""Scale of the random weights' product, so that answers differ."""
PROMPT = "What is the capital of France?"


@dataclass
class Name:
    """A name under which adapters are registered: the contents that may answer now, and the running requests."""

    allowed: set[int] = field(default_factory=set)
    served: bool = False


@dataclass
class Tally:
    """What happened."""

    answered: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    refused_changes: list[str] = field(default_factory=list)
    changes: int = 0
    first_token_s: list[float] = field(default_factory=list)


class Churn:
    """The clients and the operator of one server."""

    def __init__(self, front: str, djl: str, contents: list[Path], expected: dict[int, str]) -> None:
        self.front, self.djl, self.contents, self.expected = front, djl, contents, expected
        self.names: dict[str, Name] = {}
        self.tally, self.over = Tally(), False
        self.client = httpx.AsyncClient(timeout=120)

    async def answer(self, model: str) -> httpx.Response:
        """The greedy answer of this model name."""
        body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        return await self.client.post(f"{self.front}/v1/completions", json=body)

    async def ask(self, seed: int) -> None:
        """A client: asks served names at random until the end."""
        choose = random.Random(seed)
        while not self.over:
            served = [name for name, known in self.names.items() if known.served]
            if not served:
                await asyncio.sleep(0.01)
                continue
            name = choose.choice(served)
            before = set(self.names[name].allowed)
            reply = await self.answer(name)
            allowed = before | self.names[name].allowed
            if reply.status_code != 200:
                self.tally.lost.append(f"{name}: {reply.status_code} {reply.text[:200]}")
            elif reply.json()["choices"][0]["text"] not in {self.expected[number] for number in allowed}:
                self.tally.wrong.append(name)
            else:
                self.tally.answered += 1

    async def register(self, name: str, number: int, by_djl: bool) -> None:
        """Register content `number` under a name, or replace what is there (vLLM's call only)."""
        known = self.names.setdefault(name, Name())
        begin = time.perf_counter()
        known.allowed.add(number)
        source = str(self.contents[number])
        if by_djl and not known.served:
            url, options = f"{self.djl}/models/demo/adapters", {"params": {"name": name, "src": source}}
        else:
            body = {"lora_name": name, "lora_path": source, "load_inplace": True}
            url, options = f"{self.front}/v1/load_lora_adapter", {"json": body}
        await self._change(url, "POST", options)
        known.allowed = {number}
        if not known.served:
            known.served = True
            reply = await self.client.post(
                f"{self.front}/v1/completions",
                json={"model": name, "prompt": PROMPT, "max_tokens": 1, "temperature": 0},
            )
            if reply.status_code == 200:
                self.tally.first_token_s.append(time.perf_counter() - begin)
            else:
                self.tally.lost.append(f"{name}, at once: {reply.status_code} {reply.text[:200]}")

    async def unregister(self, name: str, by_djl: bool) -> None:
        """Unload while requests that began before still run."""
        self.names[name].served = False
        await asyncio.sleep(0)
        if by_djl:
            await self._change(f"{self.djl}/models/demo/adapters/{name}", "DELETE", {})
        else:
            await self._change(f"{self.front}/v1/unload_lora_adapter", "POST", {"json": {"lora_name": name}})

    async def _change(self, url: str, method: str, options: dict[str, Any]) -> None:
        reply = await self.client.request(method, url, **options)
        self.tally.changes += 1
        if reply.status_code != 200:
            self.tally.refused_changes.append(f"{url}: {reply.status_code} {reply.text[:200]}")

    async def run(self, count: int, clients: int) -> None:
        """Every content comes under a name of its own; every third is replaced, every second goes and some return."""
        asking = [asyncio.ensure_future(self.ask(seed)) for seed in range(clients)]
        for number in range(count):
            await self.register(f"a{number}", number, by_djl=number % 2 == 0)
            if number % 3 == 2:
                await self.register(f"a{number - 1}", (number + 1) % count, by_djl=False)
            if number % 2 == 1:
                await self.unregister(f"a{number - 1}", by_djl=number % 4 == 1)
            if number % 10 == 9:
                await self.register(f"a{number - 1}", number - 1, by_djl=True)
        for name in [name for name, known in self.names.items() if known.served]:
            await self.unregister(name, by_djl=True)
        self.over = True
        await asyncio.gather(*asking)


async def measure(options: argparse.Namespace, folder: Path, front: str, djl: str) -> None:
    """Ask alone, then under churn; print the table."""
    contents = [folder / "adapters" / str(number) for number in range(options.adapters)]
    for number, directory in enumerate(contents):
        make_adapter(DEMO_MODEL, directory, rank=4, seed=number, strength=STRENGTH)
    churn = Churn(front, djl, contents, {})
    await until_ready(churn)
    for number in range(options.adapters):
        name = f"alone{number}"
        await churn.register(name, number, by_djl=False)
        churn.expected[number] = (await churn.answer(name)).json()["choices"][0]["text"]
        await churn.unregister(name, by_djl=False)
    churn.names.clear()
    churn.tally = Tally()
    begin = time.perf_counter()
    await churn.run(options.adapters, options.clients)
    tally, elapsed = churn.tally, time.perf_counter() - begin
    print("| what | found |\n| --- | --- |")
    print(f"| different answers of {options.adapters} adapters | {len(set(churn.expected.values()))} |")
    print(f"| changes in {elapsed:.0f} s, refused | {tally.changes}, {len(tally.refused_changes)} |")
    print(f"| requests answered | {tally.answered} |")
    print(f"| requests lost | {len(tally.lost)} |")
    print(f"| answers of a wrong adapter | {len(tally.wrong)} |")
    median, worst = statistics.median(tally.first_token_s), max(tally.first_token_s)
    print(f"| from registering to the first token, median and longest | {median:.3f} s, {worst:.3f} s |")
    for text in [*tally.lost, *tally.wrong, *tally.refused_changes][:10]:
        print(text, file=sys.stderr)
    await churn.client.aclose()


async def until_ready(churn: Churn) -> None:
    """Wait until the server answers."""
    async with asyncio.timeout(START_S):
        while True:
            try:
                if (await churn.answer("demo")).status_code == 200:
                    return
            except httpx.TransportError:
                await asyncio.sleep(0.2)


def main() -> None:
    """Serve, measure, stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument("--clients", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dragoman-churn-") as name:
        folder = Path(name)
        ports = {f"DRAGOMAN_{port}": free_port() for port in PORTS}
        environment = {**os.environ, **ports, "DRAGOMAN_DATA_DIR": str(folder / "data")}
        command = [sys.executable, "-W", "ignore", "manage.py", "serve", "--model", str(DEMO_MODEL)]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        try:
            front, djl = (f"http://127.0.0.1:{ports[f'DRAGOMAN_{port}_PORT']}" for port in ("FRONT", "DJL"))
            asyncio.run(measure(options, folder, front, djl))
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
