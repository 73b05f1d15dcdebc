"""What this dialect keeps between requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from inference.dialects.djl.results import Results


@dataclass(frozen=True, slots=True)
class DjlState:
    """One for each process."""

    results: Results = field(default_factory=Results)
