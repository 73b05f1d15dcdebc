"""The interface of a quantization method. A method is a file in this folder with an `ENTRY`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

from engine import registry
from engine.quantization import NONE

if TYPE_CHECKING:
    import torch


class QuantizedLayers(Protocol):
    """Makes the quantized layers of a device. On the CPU a layer has the interface of `engine.cpu.layers.Linear` or
    `Gate`; on CUDA a linear layer is any module that maps [..., in] to [..., out]. Adapters are supported by layers
    that are not quantized, and on the CPU also by layers with a `lora`.
    """

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any | None:
        """A layer y = x W^T + b for a weight [out, in], which may still be on the host; None: do not quantize it."""
        ...

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> Any | None:
        """A layer silu(x G^T) * (x U^T) for two weights [out, in]; None: do not quantize them. Called on
        the CPU only.
        """
        ...


class Quantization(Protocol):
    """A quantization method. The output layer is never quantized."""

    tolerance: float
    """The largest logit error that verification accepts, relative to the largest logit."""

    def refusal(self, device: str, num_devices: int) -> str | None:
        """Why the method cannot run on `num_devices` devices of the kind `device` on this machine; None if it can."""
        ...

    def layers(self, kind: str, device: torch.device) -> QuantizedLayers:
        """The factory of layers for a backend of this kind, with weights on `device`."""
        ...

    def extra_bytes(self, largest: int, dtype: torch.dtype) -> int:
        """Bytes of device memory that a step needs for the method; `largest`: elements of the largest weight, of
        `dtype`.
        """
        ...


def method(name: str) -> Quantization | None:
    """The method of that name; None for "none"."""
    return None if name == NONE else cast("Quantization", registry.entry("quantization", name))
