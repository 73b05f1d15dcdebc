"""Reads facts from a model's configuration, without loading the model."""

from __future__ import annotations

import json
from pathlib import Path

MAX_CONFIG_BYTES = 1 << 20
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""The names under which configurations give the longest sequence."""


def longest_sequence(source: str) -> int | None:
    """The longest sequence in tokens that a model declares; None if its configuration is not on this machine, or says
    nothing. A worker checks it again.
    """
    path = Path(source) / "config.json"
    if not path.is_file():
        if not _is_hub_id(source):
            return None
        from huggingface_hub import try_to_load_from_cache  # only here: it costs every process memory

        cached = try_to_load_from_cache(source, "config.json")
        if not isinstance(cached, str):
            return None
        path = Path(cached)
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            return None
        config = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    nested = config.get("text_config")
    for place in (config, nested if isinstance(nested, dict) else {}):
        for name in LENGTHS:
            value = place.get(name)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _is_hub_id(source: str) -> bool:
    return source.count("/") <= 1 and not source.startswith((".", "/", "~"))
