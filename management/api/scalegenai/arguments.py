"""Reads `vllm_extra_args`: the flags of vLLM that are engine options here. Others are kept."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import Any

from management.api.scalegenai.secrecy import HIDDEN, is_secret

NUMBERS = frozenset({"max_model_len", "max_num_seqs", "max_num_batched_tokens"})
WORDS = frozenset({"dtype", "quantization"})
DTYPES = {"half": "float16", "float": "float32"}
"""vLLM's further names of types."""


@dataclass(slots=True)
class Arguments:
    """`options` are engine options by name; `kept` is the text without secrets; `errors` and `unused` are for people."""

    options: dict[str, Any] = field(default_factory=dict)
    kept: str = ""
    unused: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def parse_arguments(text: str) -> Arguments:
    """Parse a command line of vLLM's flags: `--name value`, `--name=value`, with dashes or underscores."""
    found = Arguments()
    try:
        words = shlex.split(text)
    except ValueError:
        found.errors.append("has a quotation mark without its pair")
        return found
    kept = []
    while words:
        flag, joined, value = words.pop(0).partition("=")
        has_value = bool(joined)
        if flag.startswith("-") and not joined and words and not words[0].startswith("--"):
            value, has_value = words.pop(0), True
        _read(found, flag, value)
        shown = HIDDEN if is_secret(flag) or is_secret(value) else value
        kept += [flag + "=" + shown] if joined else [flag, shown] if has_value else [flag]
    found.kept = shlex.join(kept)
    return found


def _read(found: Arguments, flag: str, value: str) -> None:
    name = flag.removeprefix("--").replace("-", "_")
    if not flag.startswith("--") or name not in NUMBERS | WORDS:
        found.unused.append(flag)
    elif name in WORDS:
        found.options[name] = DTYPES.get(value, value) if name == "dtype" else value
    elif value.isascii() and value.isdigit() and len(value) <= 9:
        found.options[name] = int(value)
    else:
        found.errors.append(f"{flag} must be a whole number")
