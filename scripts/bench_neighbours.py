"""Measures the effect of a grammar on other streams: inter-token gaps of streams of free text.

    python -m scripts.bench_neighbours [--model smollm2-135m] [--streams 4] [--tokens 150] [--threads 0] [--only NAME ...]

For each grammar: streams of free text alone, then with two streams of that grammar. The table has the median gap alone, and
the longest gap, alone and beside the grammar, as a multiple of it. A worker that dies is reported and replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

from engine.client import EngineClient, EngineDead
from engine.sampling.params import Grammar, SamplingParams
from scripts.bench import engine_worker, prompts
from scripts.random_models import DEMO, make_model


def _chain(count: int) -> str:
    definitions = {
        f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(count)
    }
    return json.dumps({"$ref": "#/$defs/a0", "$defs": {**definitions, f"a{count}": {"type": "string"}}})


def _rules(count: int) -> str:
    return "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(count)) + f'a{count}: "x"'


_PROPERTIES = {f"p{i}": {"type": "string"} for i in range(2500)}
GRAMMARS = {
    "ambiguous": Grammar("grammar", 'start: s\ns: s s | s s s | /[a-z ]/ | ""'),
    "ambiguous pairs": Grammar("grammar", "start: s\ns: s s | /[a-z ]/"),
    "expressions": Grammar("grammar", 'start: e\ne: e "+" e | e "*" e | e e | /[a-z]/ | "(" e ")"'),
    "to the right": Grammar("grammar", 'start: s\ns: /[a-z ]/ s | /[a-z]/ s s | ""'),
    "late": Grammar("grammar", 'start: /[a-z ]{300}/ s\ns: s s | s s s | /[a-z ]/ | ""'),
    "long terminals": Grammar("regex", "(.{1,300}[ab].{250,300}[cd]){1,50}"),
    "chain of references": Grammar("json_schema", _chain(1250)),
    "10,000 references": Grammar("json_schema", _chain(10_000)),
    "chain of rules": Grammar("grammar", _rules(4000)),
    "2,500 properties": Grammar("json_schema", json.dumps({"type": "object", "properties": _PROPERTIES})),
    "harmless": Grammar("regex", "([a-z]{2,9} ){500}"),
}


async def gaps(client: EngineClient, prompt: list[int], tokens: int) -> list[float]:
    """Seconds between the outputs of one stream of free text."""
    params = SamplingParams(max_tokens=tokens, temperature=1.0, seed=1, ignore_eos=True)
    times = [time.perf_counter() async for _ in client.generate(prompt, params)]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


async def structured(client: EngineClient, prompt: list[int], grammar: Grammar, tokens: int) -> str:
    """How streams of this grammar, one after the other, go until they are cancelled."""
    count = ended = refused = 0
    try:
        for seed in itertools.count():
            params = SamplingParams(max_tokens=tokens, temperature=1.0, seed=seed, ignore_eos=True, grammar=grammar)
            async for output in client.generate(prompt, params):
                count += len(output.token_ids)
                refused += output.error is not None
            ended += 1
            await asyncio.sleep(0.01)  # as a client's next request would take
    except asyncio.CancelledError:
        pass
    return f"{count} tokens, {ended} ended, {refused} of them with an error"


async def beside(client: EngineClient, options: argparse.Namespace, grammar: Grammar | None) -> tuple[list[float], str]:
    """All gaps of the free streams, and how a stream of the grammar went."""
    work = prompts(options.streams + 2, 32, 1)
    others = [
        asyncio.create_task(structured(client, prompt, grammar, options.tokens))
        for prompt in work[options.streams :]
        if grammar is not None
    ]
    found = await asyncio.gather(*(gaps(client, prompt, options.tokens) for prompt in work[: options.streams]))
    for task in others:
        task.cancel()
    ends = await asyncio.gather(*others)
    # The first gaps are those of prompts that join.
    return [gap for stream in found for gap in stream[8:]], ends[0] if ends else ""


async def measure(model: Path, name: str, options: argparse.Namespace) -> str:
    """A row of the table, from a worker of its own."""
    with engine_worker(model, options.dtype, options.threads) as config:
        client = EngineClient(config.address, config.worker_id, config.epoch)
        await client.connect()
        await beside(client, options, None)
        alone, _ = await beside(client, options, None)
        usual = statistics.median(alone)
        cells = f"{name} | {usual * 1e3:.1f} | {max(alone) / usual:.1f}"
        try:
            found, end = await beside(client, options, GRAMMARS[name])
        except EngineDead:
            return f"| {cells} | the worker died | | |"
        finally:
            await client.close()
        ordered = sorted(found)
        rare = ordered[int(0.99 * len(ordered))]
        return f"| {cells} | {ordered[-1] / usual:.1f} | {rare / usual:.1f} | {end} |"


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="A random model to make, or `demo`.")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--only", nargs="*", choices=[*GRAMMARS], default=[*GRAMMARS])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dragoman-bench-") as folder:
        model = DEMO if options.model == "demo" else make_model(Path(folder), options.model)
        print("| grammar | median ms alone | worst / median, alone | worst / median, beside it | p99 / median | it |")
        print("| --- | --- | --- | --- | --- | --- |", flush=True)
        for name in options.only:
            print(asyncio.run(measure(model, name, options)), flush=True)


if __name__ == "__main__":
    main()
