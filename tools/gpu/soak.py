"""The part `soak`: requests of all lengths come and go on a small KV cache, some with adapters, some aborted. What
the device answers is compared with what the CPU's engine answers, token for token, in float32.
"""

from __future__ import annotations

import functools
import random
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.failures import FinishReason
from engine.gpu.backend import DeviceBackend
from engine.messages import AdapterRef, Submit, TokenLogprob
from engine.sampling.params import SamplingParams
from tests.models.adapters import make_adapter
from tests.models.random_models import make_model
from tools.gpu.results import Figure

if TYPE_CHECKING:
    from pathlib import Path

    from tools.gpu.part import Run

SECONDS, COMPARED = 25, 600
"""Of the device's work, and the most requests whose tokens the CPU computes again."""
OUTSTANDING, VOCAB, CLIENT = 96, 400, 1
ABORTED = 0.15
NEAR_TIE = 1e-3
"""Where the two best log-probabilities are closer than this, either token is right."""


@dataclass
class Asked:
    """A request, and what became of it."""

    prompt: list[int]
    adapter: AdapterRef | None
    tokens: int
    aborted_after: int | None
    got: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ended: FinishReason | None = None


def run(run: Run) -> None:
    """The device's work, then the CPU's."""

    @functools.cache
    def soaked() -> Soaked:
        folder = run.folder / f"soak-{run.argument}"
        model = make_model(folder, "llama")
        adapters = [make_adapter(model, folder / f"a{number}", 8, number, strength=8.0) for number in range(3)]
        return soak(run, model, adapters, random.Random(run.argument))

    run.measure("device", lambda: soaked().figures)
    run.measure("CPU", lambda: compared(run, soaked()))


@dataclass
class Soaked:
    """What the device did: its figures, and the requests that nobody aborted."""

    model: Path
    whole: list[Asked]
    figures: list[Figure]


def soak(run: Run, model: Path, adapters: list[AdapterRef], rng: random.Random) -> Soaked:
    """Run the device for a while, and let it finish."""
    core = device_engine(run, model)
    asked: dict[int, Asked] = {}
    begun = time.monotonic()
    least = 3 if run.dry else OUTSTANDING
    early = 0
    while time.monotonic() - begun < (0 if run.dry else SECONDS) or len(asked) < least:
        while len(core.requests) < least:
            number = len(asked)
            asked[number] = request(rng, adapters, run.dry)
            submit(core, number, asked[number])
        step(core, asked)
        if not early and time.monotonic() - begun > SECONDS / 4:
            early = memory(run)
    while core.has_work:
        step(core, asked)
    elapsed_s = time.monotonic() - begun
    core.check_integrity()
    grown = memory(run) - early if early else 0
    core.close()
    whole = [each for each in asked.values() if each.aborted_after is None]
    found = {
        "requests": len(asked), "aborted": len(asked) - len(whole), "preempted": core.scheduler.num_preemptions,
        "tokens a second": sum(len(each.got) for each in asked.values()) / elapsed_s, "MiB more at the end": grown / (1 << 20),
    }  # fmt: skip
    return Soaked(model, whole, [Figure(row=f"soak {run.argument}", unit=u, value=v) for u, v in found.items()])


def compared(run: Run, soaked: Soaked) -> list[Figure]:
    """Requests of the whole time, computed again by the CPU."""
    some = soaked.whole[:: max(1, len(soaked.whole) // COMPARED)]
    differing = compare(soaked.model, some)
    if differing:
        raise RuntimeError(f"{differing} of {len(some)} requests have other tokens than on the CPU")
    return [Figure(row=f"soak {run.argument}", unit="requests with the CPU's tokens", value=len(some))]


def device_engine(run: Run, model: Path) -> EngineCore:
    """With few blocks, so that sequences are preempted, and fewer slots than adapters."""
    config = EngineConfig(model=str(model), device="cpu" if run.dry else "cuda", dtype="float32", max_num_seqs=32,
                          max_num_batched_tokens=128, kv_cache_bytes=1 << 20, max_adapters=2, threads=1)  # fmt: skip
    return EngineCore(config, DeviceBackend(config, run.device))


def request(rng: random.Random, adapters: list[AdapterRef], dry: bool) -> Asked:
    """A random one."""
    most = 8 if dry else 120
    return Asked(
        prompt=[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, most))],
        adapter=rng.choice([None, *adapters]),
        tokens=rng.randint(1, 4 if dry else 100),
        aborted_after=rng.randint(0, 60) if rng.random() < ABORTED else None,
    )


def submit(core: EngineCore, number: int, asked: Asked, logprobs: int | None = None) -> None:
    """Greedy, to its full length."""
    params = SamplingParams(max_tokens=asked.tokens, temperature=0.0, ignore_eos=True, logprobs=logprobs)
    refused = core.submit(CLIENT, Submit(number, asked.prompt, params, adapter=asked.adapter))
    if refused is not None:
        raise RuntimeError(f"a request was refused: {refused.error}")


def step(core: EngineCore, asked: dict[int, Asked]) -> None:
    """Collect the outputs, and abort whose time has come."""
    for output in core.step().get(CLIENT, []):
        one = asked[output.request_id]
        if output.error is not None:
            raise RuntimeError(f"a request failed: {output.error}")
        one.got += output.token_ids
        one.logprobs += output.logprobs or []
        one.ended = output.finish_reason
        if one.aborted_after is not None and len(one.got) >= one.aborted_after and one.ended is None:
            core.abort(CLIENT, [output.request_id])
    if core.blocked:
        time.sleep(1e-3)  # as a worker does, or the thread that reads adapters would hardly get the interpreter


def memory(run: Run) -> int:
    """Bytes that torch holds of the device."""
    return 0 if run.dry else int(torch.cuda.memory_reserved())


def compare(model: Path, asked: list[Asked]) -> int:
    """How many have other tokens than on the CPU, up to the first near-tie there."""
    core = EngineCore(
        EngineConfig(model=str(model), device="cpu", dtype="float32", max_step_ms=0, kv_cache_bytes=64 << 20)
    )
    again = {n: Asked(one.prompt, one.adapter, one.tokens, None) for n, one in enumerate(asked)}
    groups: dict[str, list[int]] = defaultdict(list)
    for number, one in again.items():
        groups[one.adapter.digest if one.adapter else ""].append(number)
    for group in groups.values():
        for number in group:
            submit(core, number, again[number], logprobs=2)
        while core.has_work:
            step(core, again)
    core.close()
    return sum(differs(one.got, again[number]) for number, one in enumerate(asked))


def differs(got: list[int], expected: Asked) -> bool:
    """Whether a token differs where the CPU was sure."""
    for token, other, logprob in zip(got, expected.got, expected.logprobs, strict=True):
        if token != other:
            (_, best), (_, second) = logprob.top[:2]
            return best - second >= NEAR_TIE
    return False
