"""What a worker is told at its start. Frozen; it validates itself and looks at nothing outside."""

from __future__ import annotations

from typing import Literal

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One worker's model, limits and address.

    `model` is a directory or a hub id; `device` "auto" is a CUDA device where there is one. `dtype` "auto" is bfloat16 where the CPU multiplies it natively (AVX512_BF16,
    AMX), else float32. `quantization` "int8" keeps the layers' weights in bytes, and takes no adapters. `max_model_len` 0 takes the model's own limit. `kv_cache_bytes` 0 sizes the cache from free memory.
    `task` "auto" goes by the model's files: sentence-transformers' and models without a head make embeddings.
    `speculative_tokens` is the most that is guessed ahead of a sequence in small batches; 0 guesses nothing.
    `tensor_parallel_size` CUDA devices compute one model together, and take no adapters. `threads` 0 is one per usable CPU (engine.process.cpus). `max_adapters` may compute at a time, `max_cached_adapters` stay in memory.
    """

    model: str
    worker_id: str = "worker"
    epoch: int = 0
    task: Literal["auto", "generate", "embed"] = "auto"
    socket: str = ""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["none", "int8"] = "none"
    max_model_len: int = 0
    block_size: int = 16
    kv_cache_bytes: int = 0
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    max_waiting_requests: int = 1024
    speculative_tokens: int = 4
    prefix_caching: bool = True
    max_adapters: int = 8
    max_cached_adapters: int = 32
    max_adapter_rank: int = 64
    tensor_parallel_size: int = 1
    threads: int = 0
    client_timeout_s: float = 30.0
    cache_dir: str = ""
    """Where files derived from the model go (a converted tokenizer); empty means a temporary folder."""

    def __post_init__(self) -> None:
        bounds = {
            "max_model_len": (self.max_model_len, 0, 1 << 24),
            "block_size": (self.block_size, 1, 256),
            "kv_cache_bytes": (self.kv_cache_bytes, 0, 1 << 44),
            "max_num_seqs": (self.max_num_seqs, 1, 4096),
            "max_num_batched_tokens": (self.max_num_batched_tokens, 1, 1 << 20),
            "max_waiting_requests": (self.max_waiting_requests, 1, 1 << 20),
            "speculative_tokens": (self.speculative_tokens, 0, 16),
            "max_adapters": (self.max_adapters, 1, 256),
            "max_cached_adapters": (self.max_cached_adapters, 1, 4096),
            "max_adapter_rank": (self.max_adapter_rank, 1, 256),
            "tensor_parallel_size": (self.tensor_parallel_size, 1, 64),
            "threads": (self.threads, 0, 1024),
        }
        for name, (value, low, high) in bounds.items():
            if not low <= value <= high:
                raise ValueError(f"{name} must be between {low} and {high}, got {value}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs: a decode step feeds one each")
        if not self.model:
            raise ValueError("model must not be empty")
