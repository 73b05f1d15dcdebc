"""Prompts without a common beginning, so that the prefix cache affects the figures only where a stage wants it to."""

from __future__ import annotations

import itertools
import os
import random

from loadtests.plan import Work

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
    "bridge",
    "window",
    "winter",
    "candle",
    "horse",
    "island",
    "letter",
    "market",
    "orchard",
    "painter",
    "road",
    "sailor",
    "tower",
    "valley",
    "wagon",
]
_numbers = itertools.count()
_source = random.Random()
os.register_at_fork(after_in_child=_source.seed)  # Locust's workers may be forks, whose prompts must not be the same
COMMON_SEED = 7


def words(count: int, rng: random.Random | None = None) -> str:
    """So many words."""
    return " ".join((rng or _source).choices(WORDS, k=count))


def next_prompt(work: Work) -> str:
    """A new prompt for the work."""
    if not work.common_words:
        return words(work.prompt_words)
    common = words(work.common_words, random.Random(COMMON_SEED))
    return f"{common} {words(work.prompt_words)}"


def next_adapter(work: Work) -> str:
    """The next of the work's adapters; "" for the model itself."""
    return work.adapters[next(_numbers) % len(work.adapters)] if work.adapters else ""
