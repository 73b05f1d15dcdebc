"""Prepares a model for requests: loads it, allocates its KV cache and warms up. Every rank runs the same code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

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
