"""Sends the same work to several running servers, in turn, and prints their figures and ratios to the first.

    python -m scripts.compare ours=http://127.0.0.1:8000 vllm=http://127.0.0.1:8100 [--cases c1 c8 c32] [--json FILE]
                              [--tokenizer tokenizer.json] [--plain NAME ...]

Every server speaks OpenAI's completions API and serves the same model. Its model name is the first of `/v1/models`, or the
text after # in the address. Prompts are token ids without a common prefix. If a server takes only text, all get texts of the
same number of tokens, made of words that are one token of `--tokenizer` each. `--plain` names servers that know neither
`ignore_eos` nor `stream_options`. Output tokens are those of `usage`. The servers take turns within a round, and another one
begins each round; figures are medians over rounds. An idle server must not use CPU time, or it disturbs the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tokenizers import Tokenizer

from scripts.bench import machine, prompts
from scripts.sse_client import Stream, post

CASES = {  # streams, prompt tokens, output tokens, requests
    "c1": (1, 128, 128, 2),
    "c8": (8, 128, 128, 16),
    "c32": (32, 128, 128, 64),
    "long": (4, 1024, 32, 8),
    "mixed": (16, 0, 0, 48),
}


@dataclass
class Server:
    """One of the compared."""

    name: str
    port: int
    model: str
    plain: bool = False


def server(argument: str) -> Server:
    """`name=url` or `name=url#model`, for argparse."""
    name, _, url = argument.partition("=")
    url, _, model = url.partition("#")
    if model:
        return Server(name, urlsplit(url).port or 80, model)
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
        model = json.load(answer)["data"][0]["id"]
    return Server(name, urlsplit(url).port or 80, model)


class Texts:
    """Makes texts of an exact number of tokens."""

    def __init__(self, tokenizer: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        texts = {i: self._tokenizer.decode([i]) for i in range(self._tokenizer.get_vocab_size())}
        words = {i: text for i, text in texts.items() if re.fullmatch(" [a-z]+", text)}
        self._words = [i for i, text in words.items() if self._encode(text) == [i]]

    def make(self, length: int, seed: int) -> str:
        """Words of one token each that stay so when they stand together."""
        ids = random.Random(seed).choices(self._words, k=length)
        text: str = self._tokenizer.decode(ids)
        if self._encode(text) != ids:
            raise ValueError("the words run together with this tokenizer")
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def work(case: str, seed: int, texts: Texts | None) -> list[tuple[list[int] | str, int]]:
    """(prompt, output tokens) of every request; the mixed case has prompts of 16 to 512 and outputs of 8 to 256 tokens."""
    _, prompt, output, requests = CASES[case]
    lengths = [(prompt, output)] * requests
    if case == "mixed":
        lengths = [(16 << (i % 6), 8 << (i * 5 % 6)) for i in range(requests)]
    if texts is not None:
        return [(texts.make(p, seed * 1000 + i), o) for i, (p, o) in enumerate(lengths)]
    return [(prompts(1, p, seed * 1000 + i)[0], o) for i, (p, o) in enumerate(lengths)]


def output_tokens(stream: Stream) -> int:
    """What the server counted."""
    found = re.findall(rb'"completion_tokens":\s*(\d+)', stream.tail)
    if not found:
        raise ValueError(f"the stream ends without usage: {stream.tail!r}")
    return int(found[-1])


async def drive(one: Server, case: str, seed: int, texts: Texts | None) -> dict[str, float]:
    """A closed loop: so many streams, each sends its next request when the last has ended."""
    todo = work(case, seed, texts)[::-1]
    done: list[Stream] = []
    more = {} if one.plain else {"ignore_eos": True, "stream_options": {"include_usage": True}}

    async def stream() -> None:
        while todo:
            prompt, output = todo.pop()
            body = {"model": one.model, "prompt": prompt, "max_tokens": output, "temperature": 0, "stream": True}
            done.append(await post(one.port, "/v1/completions", {**body, **more}))

    start = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(CASES[case][0])))
    elapsed = time.perf_counter() - start
    first = [s.ttft_s * 1e3 for s in done]
    gaps = [gap * 1e3 for s in done for gap in s.gaps_s]
    return {
        "tokens_per_s": sum(map(output_tokens, done)) / elapsed,
        "ttft_p50_ms": statistics.median(first),
        "ttft_p95_ms": percentile(first, 0.95),
        "itl_p50_ms": statistics.median(gaps),
        "itl_p95_ms": percentile(gaps, 0.95),
    }


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of them do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    """In turn; medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", type=server, metavar="name=url[#model]")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=["c1", "c8", "c32"])
    parser.add_argument("--tokenizer", type=Path, help="Ask by texts of this tokenizer.json.")
    parser.add_argument("--plain", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="A new one each time: servers cache prompts."
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    texts = Texts(options.tokenizer) if options.tokenizer else None
    for one in options.servers:
        one.plain = one.name in options.plain
    print("| case | server | tok/s | ratio of the first to it | TTFT p50 / p95 ms | ITL p50 / p95 ms |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    rows: list[dict[str, Any]] = []
    for case in options.cases:
        found: dict[str, list[dict[str, float]]] = {one.name: [] for one in options.servers}
        for number in range(options.rounds):
            shift = number % len(options.servers)
            for one in options.servers[shift:] + options.servers[:shift]:
                found[one.name].append(asyncio.run(drive(one, case, options.seed + number, texts)))
        ours = found[options.servers[0].name]
        for name, runs in found.items():
            row: dict[str, Any] = {"case": case, "server": name}
            row |= {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            pairs = zip(ours, runs, strict=True)
            row["ratio"] = statistics.median(a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs)
            rows.append(row)
            print(
                f"| {case} | {name} | {row['tokens_per_s']:.1f} | {row['ratio']:.2f} "
                f"| {row['ttft_p50_ms']:.0f} / {row['ttft_p95_ms']:.0f} "
                f"| {row['itl_p50_ms']:.1f} / {row['itl_p95_ms']:.1f} |",
                flush=True,
            )
    if options.json:
        record = {
            "machine": machine(),
            "cases": options.cases,
            "rounds": options.rounds,
            "seed": options.seed,
            "rows": rows,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
