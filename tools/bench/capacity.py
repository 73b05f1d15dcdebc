"""Computes how many workers a load needs, and what they cost, from the rates of one worker that it has measured.

    python -m tools.bench.capacity measure --url http://127.0.0.1:8000 --out rates.json
    python -m tools.bench.capacity plan --rates rates.json --requests 20 --prompt 600 --output 150 --speed 10 --prices 1.2

`measure` asks a server whose deployment has one worker and nothing else to do: tokens/s of prompts that share nothing, and of outputs at
several numbers of streams. `plan` takes one such file for each kind of worker. A worker computes either a prompt or a decode
step: of each second, prompts take `requests * tokens / rate`, outputs the same with the rate at the chosen number of streams, and together
no more than `--utilization`, because requests come at random. While a prompt is computed nobody else gets tokens, so a user's speed is that of
decoding times the share of time that prompts leave. Workers that only prefill leave all of it. The plan knows neither bursts longer than
the queue bears nor failures: add a worker for the largest thing that may fail.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from benchmarks.client import Address, Question, ask

PROMPT_TOKENS, OUTPUT_TOKENS = 512, 128
PREFILLS, AT_ONCE = 16, 4
TOKEN_IDS = range(100, 1000)
"""Ids of which prompts are made: every tokenizer has them."""


class Rates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one worker does: tokens/s of prompts alone, and of all outputs together at each number of streams."""

    name: str
    prompt_tokens_s: float
    output_tokens_s: dict[int, float]


@dataclass(frozen=True)
class Load:
    """Requests per second, and of each the prompt tokens that no cache has, the output tokens, and the user's tokens/s."""

    requests_s: float
    prompt_tokens: float
    output_tokens: float
    user_tokens_s: float


@dataclass(frozen=True)
class Plan:
    """Workers of one kind. `prefill`: those that only compute prompts; 0 if every worker does both."""

    kind: str
    prefill: int
    workers: int
    streams: int
    user_tokens_s: float
    busy: float
    price_h: float | None

    def cost_h(self) -> float | None:
        """Of all workers, per hour."""
        return None if self.price_h is None else self.price_h * (self.prefill + self.workers)


def joined(rates: Rates, load: Load, utilization: float, price_h: float | None = None) -> Plan | None:
    """The fewest workers that do both; None if no number of streams is fast enough for the user."""
    prompt_s = load.prompt_tokens / rates.prompt_tokens_s
    best: Plan | None = None
    for streams, rate in sorted(rates.output_tokens_s.items()):
        left = 1 - load.user_tokens_s * streams / rate  # the share of time that prompts may take
        if left <= 0:
            continue
        busy_s = prompt_s + load.output_tokens / rate
        most = utilization / busy_s
        if prompt_s > 0:
            most = min(most, left / prompt_s)
        workers = max(1, math.ceil(load.requests_s / most))
        each = load.requests_s / workers
        plan = Plan(rates.name, 0, workers, streams, (1 - each * prompt_s) * rate / streams, each * busy_s, price_h)
        if best is None or plan.workers < best.workers:
            best = plan
    return best


def apart(rates: Rates, load: Load, utilization: float, price_h: float | None = None) -> Plan | None:
    """The fewest workers of which some only prefill; None if no number of streams is fast enough for the user."""
    usable = {n: rate for n, rate in rates.output_tokens_s.items() if rate / n >= load.user_tokens_s}
    if not usable:
        return None
    streams = max(usable, key=lambda n: (usable[n], -n))
    prompts, outputs = load.requests_s * load.prompt_tokens, load.requests_s * load.output_tokens
    prefill = max(1, math.ceil(prompts / rates.prompt_tokens_s / utilization))
    decode = max(1, math.ceil(outputs / usable[streams] / utilization))
    busy = (prompts / rates.prompt_tokens_s + outputs / usable[streams]) / (prefill + decode)
    return Plan(rates.name, prefill, decode, streams, usable[streams] / streams, busy, price_h)


def plans(kinds: Sequence[tuple[Rates, float | None]], load: Load, utilization: float) -> list[Plan]:
    """All plans that keep the user's speed, the cheapest first, or the smallest where a price is missing."""
    made = [way(rates, load, utilization, price) for rates, price in kinds for way in (joined, apart)]
    found = [plan for plan in made if plan is not None]
    priced = all(plan.price_h is not None for plan in found)
    return sorted(found, key=lambda plan: (plan.cost_h() or 0.0 if priced else 0.0, plan.prefill + plan.workers))


def table(found: Sequence[Plan], load: Load) -> Iterator[str]:
    """Lines of a Markdown table."""
    yield "| kind | prefill only | others | streams each | a user's tok/s | busy | cost/h | cost per million output tokens |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for plan in found:
        cost = plan.cost_h()
        million = "" if cost is None else f"{cost / (load.requests_s * load.output_tokens * 3600) * 1e6:.2f}"
        money = "" if cost is None else f"{cost:.2f}"
        counts = f"{plan.prefill or ''} | {plan.workers} | {plan.streams}"
        yield f"| {plan.kind} | {counts} | {plan.user_tokens_s:.1f} | {plan.busy:.0%} | {money} | {million} |"


async def measure(address: Address, streams: Sequence[int], seed: int) -> Rates:
    """Measure the worker behind a server; raises AnswerError."""
    chance = random.Random(seed)

    def question(prompt: int, tokens: int) -> Question:
        return Question(chance.choices(TOKEN_IDS, k=prompt), "", tokens)

    await ask(question(PROMPT_TOKENS, 2), address)  # what is made at the first request is not measured
    asked = [question(PROMPT_TOKENS, 1) for _ in range(PREFILLS)]
    begin = time.perf_counter()
    for start in range(0, PREFILLS, AT_ONCE):
        await asyncio.gather(*(ask(each, address) for each in asked[start : start + AT_ONCE]))
    prompt_rate = PREFILLS * PROMPT_TOKENS / (time.perf_counter() - begin)
    outputs: dict[int, float] = {}
    for count in streams:
        answers = await asyncio.gather(*(ask(question(16, OUTPUT_TOKENS), address) for _ in range(count)))
        outputs[count] = count * statistics.median(answer.tokens_per_s or 0.0 for answer in answers)
    return Rates(address.model, prompt_rate, outputs)


def arguments_of(line: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    measuring = parts.add_parser("measure", help="measure the one worker of a running server")
    measuring.add_argument("--url", default="http://127.0.0.1:8000", help="a server on this machine")
    measuring.add_argument("--model", default="demo")
    measuring.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    measuring.add_argument("--out", type=Path, required=True)
    planning = parts.add_parser("plan", help="compute the workers for a load")
    planning.add_argument(
        "--rates", type=Path, nargs="+", required=True, help="a file of `measure` for each kind of worker"
    )
    planning.add_argument("--prices", type=float, nargs="+", help="of a worker of each kind, per hour")
    planning.add_argument("--requests", type=float, required=True, help="per second")
    planning.add_argument("--prompt", type=float, required=True, help="mean tokens of a prompt")
    planning.add_argument(
        "--cached", type=float, default=0.0, help="of these, the share that the prefix cache has, 0 to 1"
    )
    planning.add_argument("--output", type=float, required=True, help="mean tokens of an answer")
    planning.add_argument("--speed", type=float, default=10.0, help="tokens/s that a user must get")
    planning.add_argument("--utilization", type=float, default=0.7)
    arguments = parser.parse_args(line)
    if arguments.part == "measure":
        if any(not 1 <= each <= 4096 for each in arguments.streams):
            parser.error("--streams must be from 1 to 4096")
        url = urlsplit(arguments.url)
        if url.scheme != "http" or url.hostname not in ("127.0.0.1", "localhost"):
            parser.error("--url must be http://127.0.0.1:PORT: it measures the machine that it runs on")
        return arguments
    if not (arguments.requests > 0 and arguments.output >= 1 and arguments.prompt >= 1 and arguments.speed > 0):
        parser.error("--requests and --speed must be above 0, --prompt and --output at least 1")
    if not (0 <= arguments.cached <= 1 and 0 < arguments.utilization <= 1):
        parser.error("--cached must be from 0 to 1, --utilization above 0 and at most 1")
    if arguments.prices is not None and len(arguments.prices) != len(arguments.rates):
        parser.error("--prices must have as many values as --rates")
    return arguments


def main(line: Sequence[str] | None = None) -> int:
    """Measure or plan; the exit status is 1 if no plan keeps the user's speed."""
    arguments = arguments_of(line)
    if arguments.part == "measure":
        address = Address(urlsplit(arguments.url).port or 80, arguments.model)
        rates = asyncio.run(measure(address, arguments.streams, seed=time.time_ns()))
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(rates), indent=2) + b"\n")
        return 0
    read = [msgspec.json.decode(path.read_bytes(), type=Rates) for path in arguments.rates]
    kinds = list(zip(read, arguments.prices or [None] * len(read), strict=True))
    load = Load(arguments.requests, arguments.prompt * (1 - arguments.cached), arguments.output, arguments.speed)
    found = plans(kinds, load, arguments.utilization)
    if not found:
        print(f"no kind of worker gives a user {arguments.speed:g} tokens/s", file=sys.stderr)
        return 1
    print("\n".join(table(found, load)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
