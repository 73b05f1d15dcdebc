"""The attention function that transformers' own layers call, and what stands behind it during a forward pass.

`install()` registers it as "paged"; no mask is ever built for that name (what masks say is recorded once, see
engine/models/record.py). What it does is decided by the current
context (`attend_with`), because several model families drop the keyword arguments that could carry it.
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
    """What an attention call does with one layer's query [H, T, D], key and value [HK, T, D]; returns [T, H, DV]."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: Options,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one layer in one forward pass, in `out` where that is given."""
        ...


class Options:
    """A layer's scale, soft-cap and sinks, as transformers passes them with each call. Its window stands in its spec."""

    __slots__ = ("scale", "sinks", "softcap")

    def __init__(self, scale: float | None, softcap: float | None, sinks: torch.Tensor | None) -> None:
        self.scale, self.softcap, self.sinks = scale, softcap, sinks


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
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The interface of transformers: query [1, H, T, D], key and value [1, HK, T, D] -> [1, T, H, DV].

    Other arguments are seen when the model is recorded, and refused there if they would matter.
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
