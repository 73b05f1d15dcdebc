"""The settings of a run, from the environment, because Locust imports the files itself."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The requests of a run. `model` None is the server's default."""

    model: str | None = os.environ.get("LOAD_MODEL") or None
    prompt_words: int = int(os.environ.get("LOAD_PROMPT_WORDS", "40"))
    output_tokens: int = int(os.environ.get("LOAD_OUTPUT_TOKENS", "64"))
    targets: str = os.environ.get("LOAD_TARGETS", "loadtests/targets.toml")


SETTINGS = Settings()
