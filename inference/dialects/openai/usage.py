"""Token counts in OpenAI's shape."""

from __future__ import annotations

from typing import Any


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """`usage`; the details are null, as vLLM leaves them by default."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
    }
