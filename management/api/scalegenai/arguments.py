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
        secret = is_secret(flag)
        # vLLM's --api-key takes several; a word without dashes takes none.
        room = len(words) if secret else 1 if flag.startswith("-") and not joined else 0
        given = [value] if joined else []
        while room and words and not words[0].startswith("--"):
            given.append(words.pop(0))
            room -= 1
        _read(found, flag, given[0] if given else "")
        shown = [HIDDEN if secret or is_secret(each) else each for each in given]
        kept += [f"{flag}={shown[0]}", *shown[1:]] if joined else [flag, *shown]
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
