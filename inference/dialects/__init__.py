"""One folder per dialect: parses bodies into `GenerationRequest`s and renders results; no engine logic."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inference.planes.declaration import Dialect

DIALECTS = (  # folders; the first dialect renders errors for paths of the front plane that belong to none
    "tgi",
    "openai",
    "vllm",
    "triton",
    "mindie",
    "djl",
    "torchserve",
)


def declared_dialects() -> list[Dialect]:
    """The declarations of all dialects, in the order of the list."""
    return [import_module(f"{__name__}.{name}.dialect").DIALECT for name in DIALECTS]
