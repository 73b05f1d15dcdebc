"""Why a generation ended, for the log: a closed set of causes, never sent to clients."""

from __future__ import annotations

from enum import StrEnum


class EndCause(StrEnum):
    """Why a sequence, or the whole request, ended."""

    END_OF_SEQUENCE = "end_of_sequence"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    GRAMMAR_COMPLETE = "grammar_complete"
    LENGTH = "length"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    """The client stopped the request."""
    CLIENT_LEFT = "client_left"
    WORKER_LOST = "worker_lost"
    SHUTDOWN = "shutdown"
    HANDED_OVER = "handed_over"
    """Another server goes on with it, after its first token."""
    FAILED = "failed"
    """The engine failed the request; see the failure's code."""


class Ending:
    """Collects how the sequences of one generation ended."""

    def __init__(self) -> None:
        self.causes: list[EndCause] = []
        self.stops: list[str | int] = []
        """Stop strings and stop tokens that were found."""
        self.failure: tuple[str, str] | None = None
        """Code of the failure that ended all sequences, and its text, which may be empty."""

    def sequence(self, cause: EndCause | None, stop_reason: str | int | None) -> None:
        """Record how a sequence ended."""
        if cause is not None:
            self.causes.append(cause)
        if stop_reason is not None:
            self.stops.append(stop_reason)

    def all(self, cause: EndCause, failure: tuple[str, str] | None = None) -> None:
        """Set one cause for every sequence, replacing earlier ones."""
        self.causes, self.failure = [cause], failure

    @property
    def fields(self) -> dict[str, object]:
        """The fields of the log line: each cause once, in the order of the sequences' ends."""
        fields: dict[str, object] = {"cause": ",".join(dict.fromkeys(self.causes)) or EndCause.CLIENT_LEFT.value}
        if self.stops:
            fields["stop"] = self.stops[0] if len(self.stops) == 1 else self.stops
        if self.failure is not None:
            fields["failure"], reason = self.failure
            fields |= {"reason": reason} if reason else {}
        return fields
