"""Rotary embeddings of the kind `longrope` (LongRoPE, arXiv 2402.13753; Phi-3, Phi-4-mini): a sequence longer than the
original length of its model rotates all of its positions by other frequencies.

transformers chooses the frequencies for a whole call, so sequences of a step would disturb each other. Here each row
has those of its own sequence: rows of long sequences are marked by `LONG`, which is added to their positions.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

LONG = 1 << 30
"""Above every position."""


class Rotary(nn.Module):
    """Cosines and sines of rows of short and long sequences, which must equal those of the `original` module."""

    short: torch.Tensor
    long: torch.Tensor

    def __init__(self, original: nn.Module, length: int) -> None:
        super().__init__()
        self._scales = []
        for name, last in (("short", 0), ("long", length)):
            cosines, _ = original(*_call(original, [0, last]))
            self._scales.append(cosines[0, 0, 0].item())  # cos 0, scaled
            self.register_buffer(name, original.inv_freq.float().clone(), persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions [1, T] -> cosines and sines [1, T, head dim] in the type of `x`."""
        is_long = position_ids[..., None] >= LONG
        positions = (position_ids % LONG)[..., None].float()
        angles = positions * torch.where(is_long, self.long, self.short)
        angles = torch.cat((angles, angles), dim=-1)
        scale = torch.where(is_long, self._scales[1], self._scales[0])
        return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)


def original_length(model: PreTrainedModel, longest: int) -> int | None:
    """The length in tokens up to which the model's sequences are short, if those of up to `longest` can be served;
    None: its embedding is of another kind, or it does more than `Rotary` computes.
    """
    modules = [module for module in model.modules() if getattr(module, "rope_type", None) == "longrope"]
    lengths = {int(module.config.rope_parameters["original_max_position_embeddings"]) for module in modules}
    if len(lengths) != 1 or longest >= LONG:
        return None
    (length,) = lengths
    try:
        return length if all(_agrees(module, length, longest) for module in modules) else None
    except Exception as error:  # of any kind; the proof refuses the model by its reason
        logger.info("sequences end at %d tokens: %s", length, error)
        return None


def install(model: PreTrainedModel, length: int) -> None:
    """Replace the model's rotary embeddings."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if getattr(module, "rope_type", None) == "longrope":
                setattr(parent, name, Rotary(module, length).to(model.device))


@torch.inference_mode()
def _agrees(module: nn.Module, length: int, longest: int) -> bool:
    """Whether `Rotary` gives the module's own bits for sequences below and above the length."""
    own = Rotary(module, length)
    marks = [0, 1, 2, 3, 5, 8, 13, length // 2, length - 1]
    for positions, offset in ((marks, 0), ([*marks, length, longest - 1], LONG)):
        x, given = _call(module, positions)
        if not all(torch.equal(*pair) for pair in zip(own(x, given + offset), module(x, given), strict=True)):
            return False
    return True


def _call(module: nn.Module, positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments for a rotary embedding: x, of which type and device count, and positions [1, T]."""
    device = module.inv_freq.device
    return torch.zeros(1, 1, 1, device=device), torch.tensor([positions], device=device)
