"""A copy of the demo model whose tokens have other ids, as another version of a model may. It imports no torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
SHIFT = 500
FIRST = 3
"""Special tokens, before this id, keep theirs."""


def shifted(folder: Path) -> dict[int, int]:
    """Make the copy; returns the new id of every old one. The weights are those of the old ids."""
    shutil.copytree(DEMO, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    moved = len(vocabulary) - FIRST
    new = {old: old if old < FIRST else FIRST + (old - FIRST + SHIFT) % moved for old in vocabulary.values()}
    tokenizer["model"]["vocab"] = {token: new[old] for token, old in vocabulary.items()}
    path.write_text(json.dumps(tokenizer))
    return new
