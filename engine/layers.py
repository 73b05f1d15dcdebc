"""Linear layers with weights packed for the CPU. Replaces `nn.Linear` and GPT-2's `Conv1D`; changes no result but rounding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine.kernels import ops
from engine.kernels.tiles import MAX_ROWS, PANEL


def has_amx() -> bool:
    """Whether oneDNN multiplies bfloat16 in tiles here: several times the speed of vectors, from some rows on."""
    return bool(torch.cpu._is_amx_tile_supported()) and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


class PanelLinear(nn.Module):
    """y = x W^T + b by our own kernel; each row's result is the same, bit by bit, whatever the other rows are."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = ops.pack_weight(weight.detach())
        self.bias: torch.Tensor | None = None
        if bias is not None:
            self.bias = torch.zeros(self.weight.shape[0] * PANEL)
            self.bias[: self.out_features] = bias.detach()

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] contiguous -> [T, out], perhaps a view of a wider one."""
        out = ops.linear(x, self.weight, self.bias)
        return out if out.shape[1] == self.out_features else out[:, : self.out_features]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        out = self.rows(x.reshape(-1, self.in_features).contiguous())
        return out.contiguous().view(*x.shape[:-1], self.out_features)


class TileLinear(PanelLinear):
    """The same for CPUs with AMX: many rows go to oneDNN, which has a packed copy of the weight for them."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self.tiles = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 256)
        self.tile_bias = None if bias is None else bias.detach()

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """As `PanelLinear`, which reads the weight once for so few rows that nothing but memory counts."""
        if x.shape[0] <= MAX_ROWS:
            return super().rows(x)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.tiles, self.tile_bias, "none", [], "")
        return out


class DenseLinear(nn.Module):
    """y = x W^T + b as torch does it, for what the kernel cannot pair up: an odd number of bfloat16 inputs."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight.detach().contiguous(), None if bias is None else bias.detach()

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out]."""
        return F.linear(x, self.weight, self.bias)

    forward = rows


Linear = PanelLinear | DenseLinear


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """The fastest of them for this weight [out, in] on this CPU."""
    if weight.dtype == torch.bfloat16 and weight.shape[1] % 2:
        return DenseLinear(weight, bias)
    if weight.dtype == torch.bfloat16 and has_amx():
        return TileLinear(weight, bias)
    return PanelLinear(weight, bias)


def pack_linears(model: nn.Module) -> None:
    """Replace every exact `nn.Linear` and `Conv1D` of the model by `make_linear` of its weight."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) not in (nn.Linear, Conv1D):
                continue
            weight = child.weight.t() if type(child) is Conv1D else child.weight
            setattr(parent, name, make_linear(weight, child.bias))
