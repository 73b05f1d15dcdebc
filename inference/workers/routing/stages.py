"""The two stages of a sequence: its prompt is computed, then its tokens. A deployment may have workers for each."""

from __future__ import annotations

from enum import StrEnum

from management.snapshot import WorkerRole


class Stage(StrEnum):
    """Where a sequence is when it is placed."""

    PREFILL = "prefill"
    DECODE = "decode"
    """Its prompt has been computed by another worker."""

    def suits(self, role: WorkerRole) -> bool:
        """Whether a worker of this role is meant for the stage."""
        return role is WorkerRole.BOTH or role.value == self.value
