"""The attention function that transformers' own layers call, and what stands behind it during a forward pass.

`install()` registers it as "paged"; no mask is ever built for that name. What it does is decided by the current
context (`attend_with`), because several model families drop the keyword arguments that could carry it.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from transformers.modeling_utils import AttentionInterface

from engine.block_pool import TRASH_BLOCK
from engine.kv_cache import AttentionSpec, KVCache

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.batch import ForwardBatch, SequenceSlice

NAME = "paged"


class Context(Protocol):
    """What an attention call does with one layer's query [H, T, D], key and value [HK, T, D]; returns [T, H, DV]."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """Attention of one layer in one forward pass."""
        ...


class Options:
    """A layer's scale, window, soft-cap and sinks, as transformers passes them with each call."""

    __slots__ = ("scale", "sinks", "softcap", "window")

    def __init__(
        self, scale: float | None, window: int | None, softcap: float | None, sinks: torch.Tensor | None
    ) -> None:
        self.scale, self.window, self.softcap, self.sinks = scale, window, softcap, sinks

    @property
    def plain(self) -> bool:
        """Whether torch's own kernel can do it."""
        return self.softcap is None and self.sinks is None


_current: Context | None = None


@contextmanager
def attend_with(context: Context) -> Iterator[None]:
    """Let attention calls inside the block go to `context`."""
    global _current
    _current = context
    try:
        yield
    finally:
        _current = None


def _paged(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The interface of transformers: query [1, H, T, D], key and value [1, HK, T, D] -> [1, T, H, DV]."""
    layer: int = module.layer_idx
    options = Options(scaling, sliding_window, softcap, s_aux)
    return attend(layer, query[0], key[0], value[0], options)[None], None


def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options) -> torch.Tensor:
    """Attention of one layer in the current context: [H, T, D], [HK, T, D], [HK, T, DV] -> [T, H, DV]."""
    if _current is None:
        raise RuntimeError("an attention layer was called outside of a step")
    return _current.attend(layer, query, key, value, options)


def install() -> None:
    """Make "paged" a known attention implementation. May be called twice."""
    AttentionInterface.register(NAME, _paged)


class Recorder:
    """Answers with plain causal attention over the call's own tokens, and notes what each layer looks like."""

    def __init__(self) -> None:
        self.specs: dict[int, AttentionSpec] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """As `Context`."""
        self.specs[layer] = AttentionSpec(
            key.shape[0], key.shape[2], value.shape[2], options.scale, options.window, options.plain
        )
        return attend_causally(query, key, value, key.shape[1], options)


@dataclass(slots=True)
class DecodeGroup:
    """Sequences of about one length that compute one token each: gathered together, attended to in one call.

    rows: [B] int64. blocks: [B * blocks_per_sequence] int64, padded with the trash block.
    keep: [B, 1, 1, L] bool, which of the L gathered keys are the sequence's own.
    """

    rows: torch.Tensor
    blocks: torch.Tensor
    keep: torch.Tensor


class PagedAttention:
    """One forward pass over the KV cache: writes the new keys and values, then attends."""

    def __init__(self, cache: KVCache, batch: ForwardBatch) -> None:
        self.cache, self.batch = cache, batch
        self._masks: dict[tuple[int, int, int | None], torch.Tensor] = {}
        decoding = [s for s in batch.sequences if s.count == 1]
        self._groups = group_decoding(decoding, cache.block_size) if len(decoding) > 1 else []
        self._others = [s for s in batch.sequences if s.count > 1 or not self._groups]
        self._longest = max(s.length for s in batch.sequences)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """As `Context`."""
        self.cache.write(layer, self.batch.slot_mapping, key.transpose(0, 1), value.transpose(0, 1))
        heads, rows, _ = query.shape
        out = query.new_zeros(rows, heads, value.shape[2])
        windowed = options.window is not None and options.window < self._longest
        grouped = bool(self._groups) and options.plain and not windowed
        if grouped:
            by_row = query.transpose(0, 1)
            for group in self._groups:
                out[group.rows] = self._group(layer, by_row[group.rows], group, options)
        for sequence in self._others if grouped else self.batch.sequences:
            new = query[:, sequence.row : sequence.row + sequence.count]
            out[sequence.row : sequence.row + sequence.count] = self._sequence(layer, new, sequence, options)
        return out

    def _group(self, layer: int, query: torch.Tensor, group: DecodeGroup, options: Options) -> torch.Tensor:
        """One token of each sequence over its own context: [B, H, D] -> [B, H, DV]."""
        key, value = self.cache.gather(layer, group.blocks, len(group.rows))  # [B, L, HK, D]
        count, heads, dim = query.shape
        # The query heads of a KV head are rows of one product: no repeat of the keys.
        packed = query.reshape(count, key.shape[2], heads // key.shape[2], dim)
        out = F.scaled_dot_product_attention(
            packed, key.transpose(1, 2), value.transpose(1, 2), attn_mask=group.keep, scale=options.scale
        )
        return out.reshape(count, heads, value.shape[3])

    def _sequence(self, layer: int, query: torch.Tensor, sequence: SequenceSlice, options: Options) -> torch.Tensor:
        """Attention of one sequence's new tokens over its whole context: [H, n, D] -> [n, H, DV]."""
        count, length = sequence.count, sequence.length
        start = max(0, length - options.window - count + 1) if options.window else 0
        key, value = self.cache.read(layer, sequence.blocks, start, length)
        key, value = key.transpose(0, 1), value.transpose(0, 1)  # [HK, length - start, D]
        if count == 1 and options.plain:
            heads, _, dim = query.shape
            packed = query.reshape(1, key.shape[0], heads // key.shape[0], dim)
            out = F.scaled_dot_product_attention(packed, key[None], value[None], scale=options.scale)
            return out.reshape(1, heads, value.shape[2])
        return attend_causally(query, key, value, length - start, options, self._masks)


def group_decoding(sequences: list[SequenceSlice], block_size: int) -> list[DecodeGroup]:
    """Groups in which at most a fifth of what is gathered is padding."""
    groups: list[list[SequenceSlice]] = []
    for sequence in sorted(sequences, key=lambda s: -s.length):
        if groups and 5 * -(-sequence.length // block_size) >= 4 * -(-groups[-1][0].length // block_size):
            groups[-1].append(sequence)
        else:
            groups.append([sequence])
    return [_decode_group(group, block_size) for group in groups]


def _decode_group(group: list[SequenceSlice], block_size: int) -> DecodeGroup:
    most = -(-group[0].length // block_size)
    tables = [list(s.blocks) + [TRASH_BLOCK] * (most - len(s.blocks)) for s in group]
    lengths = torch.tensor([s.length for s in group])
    keep = torch.arange(most * block_size)[None] < lengths[:, None]
    return DecodeGroup(torch.tensor([s.row for s in group]), torch.tensor(tables).flatten(), keep[:, None, None])


def attend_causally(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    length: int,
    options: Options,
    masks: dict[tuple[int, int, int | None], torch.Tensor] | None = None,
) -> torch.Tensor:
    """The last n of `length` tokens attend to all before them: [H, n, D] over [HK, length, D] -> [n, H, DV]."""
    count = query.shape[1]
    groups = query.shape[0] // key.shape[0]
    window = options.window if options.window and options.window < length else None
    if options.plain and window is None and count == length:
        out = F.scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, scale=options.scale, enable_gqa=groups > 1
        )
        return out[0].transpose(0, 1)
    keep = _mask(count, length, window, {} if masks is None else masks)
    if options.plain:
        out = F.scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=keep, scale=options.scale, enable_gqa=groups > 1
        )
        return out[0].transpose(0, 1)
    scale = query.shape[2] ** -0.5 if options.scale is None else options.scale
    scores = (query @ key.repeat_interleave(groups, 0).transpose(1, 2)).float() * scale  # [H, n, length]
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~keep, -torch.inf)
    if options.sinks is not None:  # a sink takes part in the softmax and contributes no value
        sinks = options.sinks.float().reshape(-1, 1, 1).expand(-1, count, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :length].to(value.dtype)
    return (weights @ value.repeat_interleave(groups, 0)).transpose(0, 1)


def _mask(
    count: int, length: int, window: int | None, masks: dict[tuple[int, int, int | None], torch.Tensor]
) -> torch.Tensor:
    """[count, length] bool: which keys each of the last `count` queries sees. Kept for the layers of one step."""
    mask = masks.get((count, length, window))
    if mask is None:
        queries, keys = torch.arange(length - count, length)[:, None], torch.arange(length)[None]
        mask = keys <= queries
        if window is not None:
            mask &= keys > queries - window
        masks[count, length, window] = mask
    return mask
