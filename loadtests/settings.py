"""What a run asks for, from the environment, because Locust reads its files by itself."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """`model` None is the server's default."""

    model: str | None = os.environ.get("LOAD_MODEL") or None
    prompt_words: int = int(os.environ.get("LOAD_PROMPT_WORDS", "40"))
    output_tokens: int = int(os.environ.get("LOAD_OUTPUT_TOKENS", "64"))
    targets: str = os.environ.get("LOAD_TARGETS", "loadtests/targets.toml")


SETTINGS = Settings()
