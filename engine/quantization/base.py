"""What a way to keep weights is to the engine. A method is a file beside this one with an `ENTRY`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

from engine import registry
from engine.quantization import NONE

if TYPE_CHECKING:
    import torch


class QuantizedLayers(Protocol):
    """Makes a device's layers. On the CPU a layer is an `engine.cpu.layers.Linear` or `Gate`; on CUDA a linear is any module that maps [..., in] to [..., out]. Adapters go into the layers that are left as they are, and on the CPU into
    those with a `lora`.
    """

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any | None:
        """Y = x W^T + b for a weight [out, in], which may still be on the host; None: leave this one as it is."""
        ...

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> Any | None:
        """silu(x G^T) * (x U^T) for two weights [out, in]; None: leave them as they are. The CPU alone asks."""
        ...


class Quantization(Protocol):
    """A method. The output layer is never given to it."""

    tolerance: float
    """The greatest difference of logits that the proof lets pass, by the greatest logit."""

    def refusal(self, device: str, num_devices: int) -> str | None:
        """Why it cannot run on so many devices of this name, on this machine; None: it can."""
        ...

    def layers(self, kind: str, device: torch.device) -> QuantizedLayers:
        """What makes the layers of a backend of this name, which keeps them on this device."""
        ...

    def extra_bytes(self, largest: int, dtype: torch.dtype) -> int:
        """Memory of the device that a step takes for it, where the largest weight has so many numbers, of type `dtype`."""
        ...


def method(name: str) -> Quantization | None:
    """The method of that name; None for "none"."""
    return None if name == NONE else cast("Quantization", registry.entry("quantization", name))
