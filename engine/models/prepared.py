"""Prepares a model for requests: loads it, allocates its KV cache and warms up. Every rank runs the same code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from engine.messages import ModelInfo
from engine.models.loader import load_model
from engine.process.progress import progress

if TYPE_CHECKING:
    from engine.backend import Backend
    from engine.config import EngineConfig
    from engine.models.loader import LoadedModel


@dataclass(frozen=True, slots=True)
class Prepared:
    """A loaded model with its KV cache. `longest`: the longest sequence that the cache can hold, in tokens."""

    loaded: LoadedModel
    cache: Any
    longest: int


def prepare(config: EngineConfig, backend: Backend) -> Prepared:
    """Load the model and allocate its KV cache. Every rank runs the same code. Raises ModelError."""
    loaded = load_model(config, backend)
    progress.begin("making the KV cache")
    limit = config.max_num_seqs * -(-loaded.max_model_len // config.block_size)
    num_blocks = backend.num_blocks(loaded.specs, loaded.dtype, limit)
    # A sequence that can never fit is refused on arrival.
    longest = min(loaded.max_model_len, (num_blocks - 1) * config.block_size)
    cache = backend.new_cache(loaded.specs, num_blocks, config.block_size, loaded.dtype)
    progress.begin("warming up")
    with torch.inference_mode():
        backend.warm_up(loaded.forward, loaded.specs, cache, longest)
    backend.serve()
    return Prepared(loaded, cache, longest)


def model_info(prepared: Prepared, config: EngineConfig, device: str) -> ModelInfo:
    """What clients are told of the model."""
    loaded = prepared.loaded
    return ModelInfo(
        directory=str(loaded.directory),
        tokenizer_file=str(loaded.tokenizer_file),
        architecture=loaded.architecture,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=device,
        vocab_size=loaded.vocab_size,
        max_model_len=prepared.longest,
        eos_token_ids=loaded.eos_token_ids,
        block_size=config.block_size,
        num_blocks=prepared.cache.num_blocks - 1,  # without the one for padding
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_adapter_rank=config.max_adapter_rank if loaded.lora_layers else 0,
        sampling_defaults=loaded.sampling_defaults,
    )
