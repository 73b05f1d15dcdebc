"""The watermark of Kirchenbauer et al. (2023), with TGI's constants: half of the vocabulary is preferred at each
position.

The half depends only on the previous token, so a text is detected by counting its preferred tokens.
"""

from __future__ import annotations

from functools import lru_cache

import torch

GAMMA = 0.5
"""The preferred share of the vocabulary."""
DELTA = 2.0
"""The bias that is added to preferred logits."""
HASH_KEY = 15485863


@lru_cache(maxsize=32)
def preferred(token_before: int, vocab_size: int) -> torch.Tensor:
    """The ids [vocab_size / 2] that are preferred after this token."""
    generator = torch.Generator().manual_seed(HASH_KEY * token_before)
    return torch.randperm(vocab_size, generator=generator)[: int(vocab_size * GAMMA)]


def mark(row: torch.Tensor, token_before: int) -> None:
    """Add the bias to the preferred tokens of one row of logits [V], in place."""
    row[preferred(token_before, row.shape[0]).to(row.device)] += DELTA
