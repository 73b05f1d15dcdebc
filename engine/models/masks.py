"""Derives a layer's window from the masks that transformers builds for that layer.

The kernels support two masks: causal, and causal within a window. The window may be an argument or only in the mask, so
the mask decides. transformers describes most masks by a function of two indices, which is called for every distance in
the longest sequence; no computation of that length is needed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A mask function of transformers: (batch, head, query, key) indices -> whether the query sees the key."""

BLOCKED = -1e4
"""A number below this, added to a score, hides the key."""
NEAR = 33
"""The number of keys that are checked one by one at each end of a query's visible range."""


class MaskError(Exception):
    """The kernels do not support the mask; the text describes it."""


def window_of_function(function: MaskFunction, length: int) -> int | None:
    """The window in sequences of up to `length` tokens, None if all earlier keys are seen; raises MaskError.

    Functions that depend on more than the indices raise TypeError, IndexError or RuntimeError.
    """
    last = length - 1
    window = _window(_sees(function, torch.tensor([last]), torch.arange(length + 1))[0], last)
    marks = {0, 1, 2, last, *(2**n for n in range(1, length.bit_length()))}
    marks |= {mark - 1 for mark in marks} | {mark + 1 for mark in marks}
    if window is not None:
        marks |= {window * n + shift for n in (1, 2) for shift in (-1, 0, 1)}
    for query in sorted(mark for mark in marks if 0 <= mark < length):
        begin = 0 if window is None else max(0, query - window + 1)
        near = {mark + shift for mark in (begin, query) for shift in range(-NEAR, NEAR)}
        keys = torch.tensor(sorted(key for key in near | marks if 0 <= key <= length))
        expected = (keys >= begin) & (keys <= query)
        if not torch.equal(_sees(function, torch.tensor([query]), keys)[0], expected):
            raise MaskError(_description(function, length))
    return window


def window_of_tensor(mask: torch.Tensor) -> int | None:
    """The window of a mask [1, 1 or heads, T, T]: True where a key is seen, or a number that is added to the score."""
    if mask.dtype == torch.bool:
        seen = mask
    else:
        seen = mask == 0
        if bool((~seen & (mask > BLOCKED)).any()):
            raise MaskError("adds a bias to its attention scores by position (ALiBi, for one)")
    seen = seen.reshape(-1, *mask.shape[-2:])
    if bool((seen != seen[:1]).any()):
        raise MaskError("hides other keys from each of its heads")
    rows, columns = seen.shape[1:]
    if rows != columns:
        raise MaskError(f"sees {columns} keys for {rows} tokens")
    window = _window(seen[0, -1], rows - 1)
    query, key = torch.arange(rows)[:, None], torch.arange(rows)[None]
    expected = (key <= query) & (key > query - (window or rows))
    if not torch.equal(seen[0].cpu(), expected):
        raise MaskError(
            "sees tokens that come later (bidirectional attention)"
            if bool((seen[0].cpu() & (key > query)).any())
            else "has a mask that is neither causal nor a sliding window"
        )
    return window


def _window(seen: torch.Tensor, query: int) -> int | None:
    """The window of the keys [keys] that one query sees; every query sees at least its own key."""
    if bool(seen[query + 1 :].any()):
        raise MaskError("sees tokens that come later (bidirectional attention)")
    keys = seen[: query + 1].nonzero().flatten()
    if not len(keys) or int(keys[-1]) != query or int(keys[-1] - keys[0]) + 1 != len(keys):
        raise MaskError("has a mask that is neither causal nor a sliding window")
    return len(keys) if int(keys[0]) else None


def _sees(function: MaskFunction, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Whether each query sees each key: [queries, keys] bool."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    seen = function(zero, zero, queries[None, None, :, None], keys[None, None, None])
    return seen.expand(1, 1, len(queries), len(keys))[0, 0]


def _description(function: MaskFunction, length: int) -> str:
    """Describe a mask that is neither causal nor a window."""
    hidden = (~_sees(function, torch.arange(length), torch.zeros(1, dtype=torch.int64))[:, 0]).nonzero().flatten()
    size = int(hidden[0]) if len(hidden) else length
    chunks = size < length and all(
        bool(_sees(function, torch.tensor([n * size + size // 2]), torch.tensor([n * size]))[0, 0])
        and not bool(_sees(function, torch.tensor([n * size]), torch.tensor([n * size - 1]))[0, 0])
        for n in range(1, min(4, length // size))
    )
    if chunks:
        return f"attends within chunks of {size} tokens (max_model_len {size} at most would avoid that)"
    return "has a mask that is neither causal nor a sliding window"
