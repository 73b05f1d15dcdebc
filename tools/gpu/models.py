"""The models that the parts measure with: random weights of a published shape made on the device, or a tiny model in
a dry run.

As a part of its own it only writes one, before the first part that needs it.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.gpu.backend import DeviceBackend
from engine.gpu.fused import FusedDecoder
from tests.models.adapters import make_adapter
from tests.models.random_models import make_model
from tools.gpu.null import VOCAB, NullBackend

if TYPE_CHECKING:
    from pathlib import Path

    from engine.messages import AdapterRef
    from tools.gpu.part import Run

RANK = 16
TINY_LENGTH = 256


def run(run: Run) -> None:
    """Write the model."""
    model_of(run, run.argument)


def model_of(run: Run, shape: str) -> Path:
    """Its directory. It stays for the parts that follow; one that was cut off while it was written is made anew."""
    target, complete = run.folder / shape, run.folder / f"{shape}.complete"
    if not complete.exists():
        shutil.rmtree(target, ignore_errors=True)
        if run.dry:
            make_model(run.folder / "tiny", "qwen2", vocab_size=VOCAB, max_position_embeddings=TINY_LENGTH).rename(
                target
            )
        else:
            with run.device:
                make_model(run.folder, shape, dtype=torch.bfloat16)
        complete.touch()
    return target


def adapters_of(run: Run, model: Path, count: int) -> list[AdapterRef]:
    """Random LoRAs of rank 16 on every linear layer. They are made anew, since their digests are not kept."""
    folder = run.folder / f"{model.name}-adapters"
    shutil.rmtree(folder, ignore_errors=True)
    return [make_adapter(model, folder / str(number), RANK, number) for number in range(count)]


def engine_of(run: Run, model: Path, quantization: str = "none", streams: int = 128, length: int = 8192) -> EngineCore:
    """An engine on the device, in a dry run one whose steps compute nothing. It computes all prompts, whole ones at
    once.
    """
    if not run.dry:
        config = EngineConfig(model=str(model), device="cuda", max_num_seqs=streams, max_model_len=length,
                              max_num_batched_tokens=8192, speculative_tokens=0, quantization=quantization,
                              prefix_caching=False, max_step_ms=0, target_ttft_ms=0)  # fmt: skip
        return EngineCore(config)
    config = EngineConfig(model=str(model), dtype="float32", max_num_seqs=streams, max_model_len=TINY_LENGTH, threads=1,
                          max_num_batched_tokens=1024, speculative_tokens=0, kv_cache_bytes=4 << 20,
                          prefix_caching=False, max_step_ms=0, target_ttft_ms=0)  # fmt: skip
    return EngineCore(config, NullBackend(config, run.device))


def path_of(core: EngineCore) -> str:
    """What differs from the fast path, for the name of a row: a proof or a capture may have failed, which is only
    logged.
    """
    backend = core.backend
    fused = isinstance(core.runner.forward, FusedDecoder)
    captured = isinstance(backend, DeviceBackend) and backend.captured
    return f"{'' if fused else ', unfused layers'}{'' if captured else ', without graphs'}"
