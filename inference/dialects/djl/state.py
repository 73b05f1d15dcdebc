"""What this dialect keeps between requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from inference.dialects.djl.models import StartupModel
from inference.dialects.djl.results import Results


@dataclass(frozen=True, slots=True)
class DjlState:
    """One for each process."""

    startup: StartupModel = field(default_factory=StartupModel)
    results: Results = field(default_factory=Results)
