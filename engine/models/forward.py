"""Transformers' own forward pass as the engine calls it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from engine.backend import Forward


def plain_forward(model: PreTrainedModel) -> Forward:
    """The forward pass of transformers. For families that compute the logits of all rows, the unwanted ones are
    dropped.
    """
    selects = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        options = {"logits_to_keep": rows} if selects else {}
        out = model(input_ids=ids, position_ids=positions, use_cache=False, **options)
        logits: torch.Tensor = out.logits[0]
        return logits if selects else logits[rows]

    return forward
