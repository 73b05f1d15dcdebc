"""Which keys a layer's queries may see, read from the masks that transformers itself makes for that layer.

The kernels know two masks: causal, and causal within a window. A layer may be told of its window, or the window may
stand in its mask alone, so the mask is what counts. transformers describes most masks by a function of two indices,
which is asked at every distance that the longest sequence has; nothing of that length is computed for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""transformers' own: (batch, head, query, key) indices -> whether the query sees the key."""

BLOCKED = -1e4
"""A number added to a score that is less than this hides the key."""
NEAR = 33
"""So many keys are looked at one by one at each end of what a query sees."""


class MaskError(Exception):
    """The mask is none that the kernels know; the text says what it does."""


def window_of_function(function: MaskFunction, length: int) -> int | None:
    """The window within sequences of up to `length` tokens, None where all earlier keys are seen; raises MaskError.

    TypeError, IndexError or RuntimeError come from functions that are not made of indices alone.
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
    """The same of a mask [1, 1 or heads, T, T]: True where a key is seen, or a number that is added to the score."""
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
    """Of what one query sees [keys]; the last key is seen by itself at least."""
    if bool(seen[query + 1 :].any()):
        raise MaskError("sees tokens that come later (bidirectional attention)")
    keys = seen[: query + 1].nonzero().flatten()
    if not len(keys) or int(keys[-1]) != query or int(keys[-1] - keys[0]) + 1 != len(keys):
        raise MaskError("has a mask that is neither causal nor a sliding window")
    return len(keys) if int(keys[0]) else None


def _sees(function: MaskFunction, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[queries, keys] bool."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    seen = function(zero, zero, queries[None, None, :, None], keys[None, None, None])
    return seen.expand(1, 1, len(queries), len(keys))[0, 0]


def _description(function: MaskFunction, length: int) -> str:
    """What a mask does that is neither causal nor a window."""
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
