"""Linear layers with weights packed for the CPU. Replaces `nn.Linear` and GPT-2's `Conv1D`; changes no result but rounding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

PACK_FROM_WEIGHTS = 256 * 1024
"""Below this many weights oneDNN's call overhead (about 30 microseconds) is more than packing gains."""
_CAN_PACK = hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class PackedLinear(nn.Module):
    """y = x W^T + b with W reordered once for oneDNN (the op that torch's Inductor emits)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 32)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        rows = x.reshape(-1, self.in_features)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        return out.view(*x.shape[:-1], self.out_features)


class DenseLinear(nn.Module):
    """y = x W^T + b as torch does it, for layers too small to pack."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        return F.linear(x, self.weight, self.bias)


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
    """The faster of the two for this weight [out, in]."""
    packs = _CAN_PACK and (weight.dtype == torch.bfloat16 or weight.numel() >= PACK_FROM_WEIGHTS)
    return PackedLinear(weight, bias) if packs else DenseLinear(weight, bias)


def pack_linears(model: nn.Module) -> None:
    """Replace every exact `nn.Linear` and `Conv1D` of the model by `make_linear` of its weight."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) not in (nn.Linear, Conv1D):
                continue
            weight = child.weight.t() if type(child) is Conv1D else child.weight
            setattr(parent, name, make_linear(weight, child.bias))
