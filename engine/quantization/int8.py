"""int8 quantization: weights in signed bytes, with a scale for each output channel. Quantized layers take no adapters.

The CPU quantizes activations too and multiplies bytes by bytes; only weights whose inputs fill whole vectors are
quantized. A CUDA device keeps the activations' type: it reads half of the memory and widens the weights inside the
product (engine/gpu/int8.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from engine.cpu import large_pages
from engine.cpu.kernels import ops
from engine.cpu.kernels.emit import LANES
from engine.cpu.kernels.int8 import has_int8_dot
from engine.cpu.kernels.tiles import ADD, GATE, STORE

if TYPE_CHECKING:
    from engine.quantization.base import Quantization, QuantizedLayers


def _quantised(weight: torch.Tensor) -> ops.BytesWeight:
    quantised = ops.quantise(weight)
    return replace(quantised, packed=large_pages.moved(quantised.packed))


class ByteLinear(nn.Module):
    """y = x W^T + b with weight and x in eight-bit numbers (engine/cpu/kernels/int8.py)."""

    lora = None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.width = ops.wide(self.out_features)
        self.weight = _quantised(weight.detach())
        self.bias: torch.Tensor | None = None
        if bias is not None:
            self.bias = torch.zeros(self.width)
            self.bias[: self.out_features] = bias.detach()

    def rows(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            out = x.new_empty(x.shape[0], self.width)
        ops.linear_int8(x, self.weight, self.bias, out, STORE)
        return out if self.width == self.out_features else out[:, : self.out_features]

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        ops.linear_int8(x, self.weight, self.bias, residual, ADD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        out = self.rows(x.reshape(-1, self.in_features).contiguous())
        return out.contiguous().view(*x.shape[:-1], self.out_features)


class ByteGate:
    """silu(x G^T) * (x U^T) with weights and x in eight-bit numbers."""

    lora = None

    def __init__(self, gate: torch.Tensor, up: torch.Tensor) -> None:
        self.out_features = gate.shape[0]
        self.weight = _quantised(ops.interleave(gate.detach(), up.detach()))
        self.width = self.weight.packed.shape[0] * LANES

    def rows(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        ops.linear_int8(x, self.weight, None, out, GATE)
        return out if self.width == self.out_features else out[:, : self.out_features]


class DeviceByteLinear(nn.Module):
    """y = x W^T + b, W [out, in] in signed bytes times a float32 scale per row of W, on a CUDA device."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        from engine.gpu.int8 import product  # imports Triton, which a machine without a CUDA device may lack

        super().__init__()
        self._product = product
        wide = weight.detach().float()
        self.scales = wide.abs().amax(1).clamp_min(1e-30) / 127
        self.bytes = (wide / self.scales[:, None]).round().to(torch.int8).contiguous()
        self.bias = None if bias is None else bias.detach().to(weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out], in the type of x."""
        return self._product(x, self.bytes, self.scales, self.bias)


class _OnCpu:
    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> ByteLinear | None:
        return ByteLinear(weight, bias) if weight.shape[1] % LANES == 0 else None

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> ByteGate | None:
        return ByteGate(gate, up) if gate.shape[1] % LANES == 0 else None


class _OnDevice:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> DeviceByteLinear:
        return DeviceByteLinear(weight.to(self._device), bias)

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> None:
        return None


class Int8:
    """The entry of this file."""

    tolerance = 0.4
    """Eight-bit weights change the logits; a wrong order of blocks or positions changes them by more
    than their size.
    """

    def refusal(self, device: str, num_devices: int) -> str | None:
        """The method needs a CPU with AVX512_VNNI, or one CUDA device."""
        if device == "cpu" and not has_int8_dot():
            return "quantization int8 needs a CPU with AVX512_VNNI"
        if num_devices > 1:
            return "quantization int8 is for one device; split weights stay as they are"
        return None

    def layers(self, kind: str, device: torch.device) -> QuantizedLayers:
        """Layers that multiply bytes on the CPU, or that widen the weights on a CUDA device."""
        return _OnCpu() if kind == "cpu" else _OnDevice(device)

    def extra_bytes(self, largest: int, dtype: torch.dtype) -> int:
        """The memory of one widened layer; steps of many rows widen whole weights."""
        extra: int = largest * dtype.itemsize
        return extra


ENTRY: Quantization = Int8()
