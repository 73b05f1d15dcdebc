"""Measures decode on a CUDA device: tokens per second, the floor by memory bandwidth, and transformers' own batching.

    python -m scripts.bench_gpu [--models qwen2.5-0.5b qwen2.5-7b] [--batches 1 32] [--tokens 256] [--json FILE]

The floor of a step is the time to read the weights (as stored in the model's files) and the batch's keys and values once,
at the bandwidth of copying a gigabyte, measured in the same run. It needs only what `engine/` needs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.messages import Submit
from engine.sampling.params import SamplingParams
from scripts.random_models import make_model

PROMPT = 128
SHORT = 16
"""Tokens of outputs that show what a call costs besides."""


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


def of_engine(
    name: str, directory: Path, options: argparse.Namespace, rate: float, quantization: str
) -> list[dict[str, Any]]:
    """One row per batch; `waiting_s` is the step's time where the host reads every step's tokens before the next."""
    config = EngineConfig(model=str(directory), device="cuda", max_num_seqs=max(options.batches), max_model_len=2048,
                          max_num_batched_tokens=8192, speculative_tokens=0, quantization=quantization)  # fmt: skip
    core, rows = EngineCore(config), []
    for batch in options.batches:
        ours(core, batch, 16, seed=1)
        row = {"model": name, "weights": quantization, "batch": batch}
        row["step_s"] = statistics.median(ours(core, batch, options.tokens, seed=2 + i) for i in range(3))
        row["floor_s"] = floor_seconds(core, directory, batch, options.tokens, rate)
        with mock.patch.object(core.runner.sampler, "choose_later", return_value=None):
            row["waiting_s"] = statistics.median(ours(core, batch, options.tokens, seed=5 + i) for i in range(3))
        rows.append(row)
    core.close()
    return rows


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per model, kind of weights and batch."""
    rate, rows = bandwidth(), []
    print(f"{torch.cuda.get_device_name()}: {rate / 1e12:.2f} TB/s measured")
    print(
        "| model | weights | batch | ms a step | without overlap | tok/s | floor / step | transformers, tok/s | ratio |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            directory = make_model(Path(folder), name, dtype=torch.bfloat16)
            found = []
            for quantization in ("none", "int8"):
                found += of_engine(name, directory, options, rate, quantization)
                torch.cuda.empty_cache()
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).cuda()
            theirs_at = {}
            for batch in options.batches:
                theirs(model, batch, 2 * SHORT, seed=1)
                theirs_at[batch] = theirs(model, batch, options.tokens, seed=2)
            del model
            torch.cuda.empty_cache()
        for row in found:
            speed, row["transformers"] = row["batch"] / row["step_s"], theirs_at[row["batch"]]
            print(f"| {name} | {row['weights']} | {row['batch']} | {row['step_s'] * 1e3:.2f} | "
                  f"{row['waiting_s'] * 1e3:.2f} | {speed:.0f} | {row['floor_s'] / row['step_s']:.2f} | "
                  f"{row['transformers']:.0f} | {speed / row['transformers']:.2f} |", flush=True)  # fmt: skip
        rows += found
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
        raise SystemExit("bench_gpu: torch finds no CUDA device here")
    rows = measure(options)
    if options.json:
        options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
