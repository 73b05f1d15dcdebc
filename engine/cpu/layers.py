"""Linear layers with weights packed for the CPU. Replaces `nn.Linear` and GPT-2's `Conv1D`; changes no result but
rounding.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.cpu import large_pages
from engine.cpu.kernels import ops
from engine.cpu.kernels.coded import encode
from engine.cpu.kernels.emit import LANES
from engine.cpu.kernels.tiles import ADD, GATE, STORE, WIDEN
from engine.cpu.lora import LoraLayer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedModel

    from engine.cpu.kernels.coded import CodedWeight
    from engine.quantization.base import QuantizedLayers


Parts = list[tuple[str, int]]
"""(path, outputs) of the model's layers that a packed layer combines, in order. Empty if it takes no adapters."""


def _in_large_pages(packed: torch.Tensor, coded: bool) -> torch.Tensor | CodedWeight:
    """A packed weight as its layer keeps it, in large pages."""
    made = encode(packed) if coded else None
    if made is None:
        return large_pages.moved(packed)
    return replace(made, packed=large_pages.moved(made.packed))


class PanelLinear(nn.Module):
    """y = x W^T + b by this package's kernel. Each row's result is bitwise independent of the other rows.

    The adapters of the rows are added.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, parts: Parts, coded: bool = False) -> None:
        """`coded`: keep the weight in twelve bits a number where that is possible."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.width = ops.wide(self.out_features)
        self.weight = _in_large_pages(ops.pack_weight(weight.detach()), coded)
        self.bias: torch.Tensor | None = None
        if bias is not None:
            self.bias = torch.zeros(self.width)
            self.bias[: self.out_features] = bias.detach()
        self.lora = LoraLayer(parts, self.in_features, weight.dtype, ops.pack_weight, self._dense, self.bias)

    def _dense(self) -> torch.Tensor:
        return ops.unpack_weight(self.weight, self.out_features)

    def rows(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[T, in] -> [T, out], a view of `out` [T, width], which is made where it is not given."""
        if out is None:
            out = x.new_empty(x.shape[0], self.width)
        ops.linear(x, self.weight, self.bias, out, STORE, self.lora.segments(x.shape[0]))
        return out if self.width == self.out_features else out[:, : self.out_features]

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """Add y to residual [T, width] float32."""
        ops.linear(x, self.weight, self.bias, residual, ADD, self.lora.segments(x.shape[0]))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out] float32, not rounded, so that the best logits stay distinct."""
        out = torch.empty(x.shape[0], self.width)
        ops.linear(x, self.weight, self.bias, out, WIDEN, self.lora.segments(x.shape[0]))
        return out[:, : self.out_features]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        out = self.rows(x.reshape(-1, self.in_features).contiguous())
        return out.contiguous().view(*x.shape[:-1], self.out_features)


class PanelGate:
    """silu(x G^T) * (x U^T): the first half of a gated feed-forward layer, in one product."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, parts: Parts, coded: bool = False) -> None:
        """`coded`: as in PanelLinear."""
        self.out_features, in_features = gate.shape
        packed = ops.pack_gate(gate.detach(), up.detach())
        self.weight = _in_large_pages(packed, coded)
        self.width = packed.shape[0] * LANES
        self.lora = LoraLayer(parts, in_features, gate.dtype, self._pack, self._dense, None)

    def _pack(self, both: torch.Tensor) -> torch.Tensor:
        return ops.pack_gate(*both.split(self.out_features))

    def _dense(self) -> torch.Tensor:
        return ops.unpack_gate(self.weight, self.out_features)

    def rows(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out], a view of `out` [T, width]."""
        ops.linear(x, self.weight, None, out, GATE, self.lora.segments(x.shape[0]))
        return out if self.width == self.out_features else out[:, : self.out_features]


class DenseLinear(nn.Module):
    """y = x W^T + b by torch, for an odd number of bfloat16 inputs, which the kernel cannot pair."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight.detach().contiguous(), None if bias is None else bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        return F.linear(x, self.weight, self.bias)


class Linear(Protocol):
    """y = x W^T + b over rows; of the `width` columns only the first `out_features` are valid."""

    width: int

    @property
    def lora(self) -> LoraLayer | None:
        """What adapters may be put into."""
        ...

    def rows(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[T, in] -> [T, out], a view of `out` [T, width], which is made where it is not given."""
        ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """Add y to residual [T, width] float32."""
        ...


class Gate(Protocol):
    """silu(x G^T) * (x U^T) over rows."""

    width: int

    @property
    def lora(self) -> LoraLayer | None:
        """What adapters may be put into."""
        ...

    def rows(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out], a view of `out` [T, width]."""
        ...


def make_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    parts: Parts,
    quantized: QuantizedLayers | None = None,
    coded: bool = False,
) -> Linear:
    """The layer of `quantized` if it makes one, else the fastest for this weight [out, in] on this CPU; raises
    ValueError for an odd bfloat16 `in`.
    """
    made: Linear | None = None if quantized is None else quantized.linear(weight, bias)
    if made is not None:
        return made
    if weight.dtype == torch.bfloat16 and weight.shape[1] % 2:
        raise ValueError("an odd number of inputs cannot be paired")
    return PanelLinear(weight, bias, parts, coded)


def make_gate(
    gate: torch.Tensor,
    up: torch.Tensor,
    parts: Parts,
    quantized: QuantizedLayers | None = None,
    coded: bool = False,
) -> Gate:
    """As `make_linear`, for the two weights [out, in] of a gated layer."""
    made: Gate | None = None if quantized is None else quantized.gate(gate, up)
    if made is not None:
        return made
    if gate.dtype == torch.bfloat16 and (gate.shape[0] % 2 or gate.shape[1] % 2):
        raise ValueError("an odd number of inputs cannot be paired")
    return PanelGate(gate, up, parts, coded)


def lora_layers(layers: Iterable[Linear | Gate]) -> list[LoraLayer]:
    """What adapters may be put into."""
    return [layer.lora for layer in layers if layer.lora is not None]


def _reads_weight(parent: nn.Module, name: str) -> bool:
    """Whether the parent's code reads this child's weight instead of calling the child."""
    functions = (
        inspect.unwrap(f) for kind in type(parent).__mro__ if kind is not nn.Module for f in vars(kind).values()
    )
    used = (
        f.__code__.co_names
        for f in functions
        if inspect.isfunction(f) and f.__name__ not in ("__init__", "_init_weights")
    )
    return any(name in names and "weight" in names for names in used)


def pack_linears(
    model: PreTrainedModel, quantized: QuantizedLayers | None = None, coded: bool = False
) -> list[LoraLayer]:
    """Replace every exact `nn.Linear` and `Conv1D` of the model by a packed layer; the output layer is never quantized.

    Returns what adapters may be put into, as far as the layers themselves go: not the output layer, which sees the rows that are
    sampled alone.
    """
    layers: list[Linear] = []
    head = model.get_output_embeddings()
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if type(child) not in (nn.Linear, Conv1D) or _reads_weight(parent, name):
                continue
            weight = child.weight.t() if type(child) is Conv1D else child.weight
            if weight.dtype == torch.bfloat16 and weight.shape[1] % 2:
                setattr(parent, name, DenseLinear(weight, child.bias))
                continue
            if child is head:
                setattr(parent, name, make_linear(weight, child.bias, [], None, coded))
                continue
            parts = [(f"{path}.{name}" if path else name, weight.shape[0])]
            packed = make_linear(weight, child.bias, parts, quantized, coded)
            setattr(parent, name, packed)
            layers.append(packed)
    return lora_layers(layers)
