"""Registers "paged" as an attention implementation of transformers (`install`).

Each forward pass sets the context (`attend_with`) that computes its attention calls, because several model families
drop the keyword arguments that could carry it. transformers builds no mask for "paged"; the masks were recorded when
the model was loaded (engine/models/record.py).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from transformers.modeling_utils import AttentionInterface

from engine.process.progress import progress

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


NAME = "paged"


class Context(Protocol):
    """Computes the attention calls of one forward pass."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: Options,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one layer: query [H, T, D], key [HK, T, D] and value [HK, T, DV] -> [T, H, DV], in `out` if
        given.
        """
        ...


class Options:
    """A layer's scale, soft-cap and sinks, as transformers passes them with each call. Its window is in its spec."""

    __slots__ = ("scale", "sinks", "softcap")

    def __init__(self, scale: float | None, softcap: float | None, sinks: torch.Tensor | None) -> None:
        self.scale, self.softcap, self.sinks = scale, softcap, sinks


_current: Context | None = None


@contextmanager
def attend_with(context: Context) -> Iterator[None]:
    """Use `context` for the attention calls inside the block."""
    global _current
    _current = context
    try:
        yield
    finally:
        _current = None


def current() -> Context | None:
    """The context of the running step."""
    return _current


def _paged(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The interface of transformers: query [1, H, T, D], key and value [1, HK, T, D] -> [1, T, H, DV].

    Other keyword arguments are checked when the model is recorded (engine/models/record.py).
    """
    layer: int = module.layer_idx
    options = Options(scaling, softcap, s_aux)
    return attend(layer, query[0], key[0], value[0], options)[None], None


def attend(
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: Options,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one layer in the current context: [H, T, D], [HK, T, D], [HK, T, DV] -> [T, H, DV]."""
    if _current is None:
        raise RuntimeError("an attention layer was called outside of a step")
    progress.moved()
    return _current.attend(layer, query, key, value, options, out)


def install() -> None:
    """Make "paged" a known attention implementation. May be called twice."""
    AttentionInterface.register(NAME, _paged)
