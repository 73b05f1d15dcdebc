"""The devices that a worker can run on, by name. A new device is a package of its own and one entry here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.models.files import ModelError
from engine.quantization.base import method as method_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.backend import Backend
    from engine.config import EngineConfig
    from engine.quantization.base import Quantization


def _cpu(config: EngineConfig, method: Quantization | None) -> Backend:
    if config.tensor_parallel_size > 1:
        raise ModelError("tensor_parallel_size is for CUDA devices; a CPU worker computes alone")
    if config.kv_offload_memory_bytes:
        raise ModelError("kv_offload_memory_bytes is for CUDA devices; a CPU's own cache is kv_cache_bytes")
    _check(method, config, "cpu")
    from engine.cpu.backend import CpuBackend

    return CpuBackend(config, method)


def _cuda(config: EngineConfig, method: Quantization | None) -> Backend:
    if not torch.cuda.is_available():
        raise ModelError("device cuda: torch finds no CUDA device here")
    _check(method, config, "cuda")
    if config.tensor_parallel_size > torch.cuda.device_count():
        raise ModelError(f"tensor_parallel_size must be at most {torch.cuda.device_count()}, the CUDA devices here")
    from engine.gpu.backend import DeviceBackend  # Triton comes with torch's CUDA builds alone

    return DeviceBackend(config, torch.device("cuda"), method)


DEVICES: dict[str, Callable[[EngineConfig, Quantization | None], Backend]] = {"cuda": _cuda, "cpu": _cpu}


def backend_for(config: EngineConfig) -> Backend:
    """The backend of the configured device; raises ModelError if the machine or the options do not allow it."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return DEVICES[device](config, method_of(config.quantization))


def _check(method: Quantization | None, config: EngineConfig, device: str) -> None:
    refusal = None if method is None else method.refusal(device, config.tensor_parallel_size)
    if refusal is not None:
        raise ModelError(refusal)
