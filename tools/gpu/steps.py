"""Measures decode on a CUDA device: tokens per second, the floor by memory bandwidth, and transformers' own batching.

    python -m tools.bench.gpu [--models qwen2.5-0.5b qwen2.5-7b] [--batches 1 32] [--tokens 256] [--json FILE]

The floor of a step is the time to read the weights (as stored in the model's files) and the batch's keys and values once,
at the bandwidth of copying a gigabyte, measured in the same run. It needs only what `engine/` needs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.messages import Submit
from engine.sampling.params import SamplingParams
from tests.models.random_models import make_model

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT = 128
SHORT = 16
"""Tokens of outputs that show what a call costs besides."""


@dataclass(frozen=True, slots=True)
class Row:
    """Decode at one batch size. `waiting_s`: the step's time where the host reads every step's tokens before the next. The last three
    are those of this engine alone.
    """

    model: str
    engine: str
    batch: int
    tokens_per_s: float
    step_s: float | None = None
    waiting_s: float | None = None
    floor_s: float | None = None

    def line(self) -> str:
        """A row of the table."""
        times = (f"{seconds * 1e3:.2f}" if seconds else "" for seconds in (self.step_s, self.waiting_s))
        share = f"{self.floor_s / self.step_s:.2f}" if self.floor_s and self.step_s else ""
        cells = (self.model, self.engine, self.batch, f"{self.tokens_per_s:.0f}", *times, share)
        return f"| {' | '.join(map(str, cells))} |"


def bandwidth() -> float:
    """Bytes read per second, in the best of some copies of a gigabyte."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * source.numel() / min(times)


def prompts(count: int, seed: int) -> list[list[int]]:
    """Random ids, so that no two share a prefix."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(10, 1000, (PROMPT,), generator=generator).tolist() for _ in range(count)]


def ours(core: EngineCore, batch: int, tokens: int, seed: int) -> float:
    """Median seconds of a decode step."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for i, prompt in enumerate(prompts(batch, seed)):
        core.submit(1, Submit(i, prompt, params))
    times = []
    while core.has_work:
        before, start = core.stats.decode_steps, time.perf_counter()
        core.step()
        if core.stats.decode_steps > before and len(core.scheduler.running) == batch:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def theirs(model: Any, batch: int, tokens: int, seed: int) -> float:
    """Tokens per second of transformers' continuous batching, by the difference to short outputs: each call sets its cache and its
    graphs up anew.
    """

    def seconds(length: int) -> float:
        config = GenerationConfig(max_new_tokens=length, do_sample=False, eos_token_id=-1, pad_token_id=0)
        start = time.perf_counter()
        done = model.generate_batch(inputs=prompts(batch, seed), generation_config=config, progress_bar=False)
        elapsed = time.perf_counter() - start
        if sum(len(output.generated_tokens) for output in done.values()) != batch * length:
            raise SystemExit("transformers did not answer all requests")
        return elapsed

    return batch * (tokens - SHORT) / (seconds(tokens) - seconds(SHORT))


def floor_seconds(core: EngineCore, directory: Path, batch: int, tokens: int, rate: float) -> float:
    """Reading once every weight but the embeddings, where those are not the output layer too, and the keys and values of
    the sequences at half of their output.
    """
    weights = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    config = AutoConfig.from_pretrained(directory)
    if not config.tie_word_embeddings:
        weights -= config.vocab_size * config.hidden_size * 2
    cached = sum(s.num_kv_heads * (s.key_dim + s.value_dim) * 2 for s in core.specs)
    return (weights + batch * (PROMPT + tokens / 2) * cached) / rate


def release() -> None:
    """Give back the memory of what came before."""
    gc.collect()
    torch.cuda.empty_cache()


def of_engine(name: str, directory: Path, options: argparse.Namespace, rate: float, quantization: str) -> Iterator[Row]:
    """One row per batch."""
    release()
    config = EngineConfig(model=str(directory), device="cuda", max_num_seqs=max(options.batches), max_model_len=2048,
                          max_num_batched_tokens=8192, speculative_tokens=0, quantization=quantization)  # fmt: skip
    core = EngineCore(config)
    for batch in options.batches:
        ours(core, batch, 16, seed=1)
        step_s = statistics.median(ours(core, batch, options.tokens, seed=2 + i) for i in range(3))
        floor_s = floor_seconds(core, directory, batch, options.tokens, rate) if quantization == "none" else None
        with mock.patch.object(core.runner.sampler, "choose_later", return_value=None):
            waiting_s = statistics.median(ours(core, batch, options.tokens, seed=5 + i) for i in range(3))
        yield Row(name, f"ours, {quantization}", batch, batch / step_s, step_s, waiting_s, floor_s)
    core.close()


def of_transformers(name: str, directory: Path, options: argparse.Namespace) -> Iterator[Row]:
    """One row per batch. A call takes ten seconds and more before its first token."""
    release()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).cuda()
    for batch in options.batches:
        theirs(model, batch, 2 * SHORT, seed=1)
        yield Row(name, "transformers", batch, theirs(model, batch, options.tokens, seed=2))


def measure(options: argparse.Namespace) -> list[Row]:
    """All rows, printed as they are found."""
    rate, rows = bandwidth(), []
    print(f"{torch.cuda.get_device_name()}: {rate / 1e12:.2f} TB/s measured")
    print("| model | engine | batch | tok/s | ms a step | without overlap | floor / step |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            with torch.device("cuda"):
                directory = make_model(Path(folder), name, dtype=torch.bfloat16)
            engines = [of_engine(name, directory, options, rate, weights) for weights in ("none", "int8")]
            for row in chain(*engines, of_transformers(name, directory, options)):
                print(row.line(), flush=True)
                rows.append(row)
    return rows


def main() -> None:
    """Measure, or say that there is nothing to measure on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["qwen2.5-0.5b", "qwen2.5-7b"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("tools.bench.gpu: torch finds no CUDA device here")
    rows = measure(options)
    if options.json:
        record = {"device": torch.cuda.get_device_name(), "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
