"""The watermark of Kirchenbauer et al. (2023), with TGI's constants: half of the vocabulary is preferred at each place.

Which half depends on the token before alone, so a reader who knows the constants counts preferred tokens in a text.
"""

from __future__ import annotations

from functools import lru_cache

import torch

GAMMA = 0.5
"""The preferred share of the vocabulary."""
DELTA = 2.0
"""What is added to preferred logits."""
HASH_KEY = 15485863


@lru_cache(maxsize=32)
def preferred(token_before: int, vocab_size: int) -> torch.Tensor:
    """Ids [vocab_size / 2] that are preferred behind this token."""
    generator = torch.Generator().manual_seed(HASH_KEY * token_before)
    return torch.randperm(vocab_size, generator=generator)[: int(vocab_size * GAMMA)]


def mark(row: torch.Tensor, token_before: int) -> None:
    """Prefer in one row of logits [V], in place."""
    row[preferred(token_before, row.shape[0])] += DELTA
