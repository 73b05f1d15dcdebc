"""Prompts without a common prefix, so that the prefix cache does not affect the figures."""

from __future__ import annotations

import itertools
import random

from loadtests.settings import SETTINGS

WORDS = [
    "river",
    "stone",
    "garden",
    "lamp",
    "forest",
    "story",
    "village",
    "key",
    "boat",
    "bell",
    "castle",
    "mountain",
    "city",
    "farm",
    "book",
    "map",
    "coin",
]
_numbers = itertools.count()


def next_prompt() -> str:
    """A new prompt of the configured length."""
    rng = random.Random(next(_numbers))
    return " ".join(rng.choice(WORDS) for _ in range(SETTINGS.prompt_words))
