"""What was used, as web processes count it and hand it over. `management.usage_store` keeps it. Imports no Django."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import date, datetime


class UsageOf(NamedTuple):
    """Whose use it is, on a day of UTC: the API key's prefix, the deployment's public id, the adapter's name, the
    client's name for its own user. "" stands for none.
    """

    day: date
    key: str
    deployment: str
    adapter: str
    end_user: str


@dataclass(slots=True)
class Sums:
    """Requests, those of them that ended with an error, and their tokens."""

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    last_at: datetime | None = None

    def add(self, other: Sums) -> None:
        """Add another's; `last_at` is the later one."""
        for name in COUNTED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.last_at is not None and (self.last_at is None or other.last_at > self.last_at):
            self.last_at = other.last_at


COUNTED = tuple(field.name for field in fields(Sums) if field.name != "last_at")


class UsageSource(Protocol):
    """Where the writer gets the sums from. It calls from a thread of its own."""

    def batch(self) -> Mapping[UsageOf, Sums]:
        """What is to be stored next: the same until `stored` is called. Empty: nothing yet."""

    def stored(self) -> None:
        """The batch is in the database."""

    def spent(self, day: date, tokens: Mapping[str, int]) -> None:
        """What the database has of the day's tokens by key, of all processes: of the keys that have a limit a day."""

    def refresh(self) -> None:
        """Make the next batch of what was counted since, unless one is waiting. Called where the counts are made."""
