"""MindIE's finish reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inference.generation.deltas import Delta


def finish_reason(delta: Delta) -> str:
    """The finish reason of TGI, Triton and native endpoints."""
    if delta.finish_reason == "length":
        return "length"
    return "eos_token" if delta.ended_by_eos else "stop_sequence"
