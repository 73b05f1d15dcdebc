"""Token counts in OpenAI's format."""

from __future__ import annotations

from typing import Any


def running_usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """`usage` of one choice in a chunk of a stream, up to that chunk."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> dict[str, Any]:
    """`usage`; without `cached_tokens` the details are null, as in vLLM by default."""
    details = None if cached_tokens is None else {"cached_tokens": cached_tokens}
    return {**running_usage(prompt_tokens, completion_tokens), "prompt_tokens_details": details}
