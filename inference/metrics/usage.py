"""Counts requests and tokens by day, API key, deployment, adapter and end user. No I/O: `management.usage_writer`
stores them.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import defaultdict
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Literal

from engine.failures import FinishReason
from inference.generation.generation import Observer
from management.usage import Sums, UsageOf

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from inference.generation.generation import Generation
    from inference.telemetry.base import EmbeddingRun

MAX_CHARACTERS = 64
MAX_END_USERS = 1000
"""Of a key on a day; later ones are counted together."""
MAX_ROWS = 20_000
"""Of a day, with names of end users."""
OTHERS = "(other)"
EPOCH = date(1970, 1, 1)
EndUsers = Literal["plain", "hash", "off"]


class UsageRecorder(Observer):
    """Counts on the event loop; a thread takes batches of what was counted.

    `end_users`: whether the names that clients give for their users are kept, kept as a keyed hash, or not kept.
    """

    def __init__(
        self,
        end_users: EndUsers,
        secret: str,
        recorded: Callable[[int, Mapping[str, int]], None] = lambda day, tokens: None,
    ) -> None:
        """`secret` keys the hashes. `recorded` is told what keys spent on a day (counted from 1970)."""
        self._end_users, self._secret, self._recorded = end_users, secret.encode(), recorded
        self._spent: tuple[date, Mapping[str, int]] | None = None
        """What the database has, until it is told on."""
        self._now: dict[UsageOf, Sums] = {}
        self._batch: dict[UsageOf, Sums] = {}
        self._day = date.min
        self._known: set[UsageOf] = set()
        """The rows of this day."""
        self._users: dict[str, set[str]] = defaultdict(set)
        """By key, the end users of this day."""

    def finished(
        self, generation: Generation, finish: FinishReason, token_times: list[float], preemptions: int
    ) -> None:
        """One that failed before its first token counts without its prompt, which was not charged either."""
        usage, adapter = generation.usage, generation.target.adapter
        computed = bool(usage.completion_tokens)
        sums = Sums(
            requests=1,
            failed=int(finish is FinishReason.ERROR),
            prompt_tokens=usage.prompt_tokens if computed else 0,
            cached_tokens=(usage.cached_tokens or 0) if computed else 0,
            output_tokens=usage.completion_tokens,
        )
        deployment, name = generation.target.entry.public_id, "" if adapter is None else adapter.name
        self._add(generation.tenant, deployment, name, generation.request.end_user, sums)

    def embedded(self, run: EmbeddingRun) -> None:
        """Embeddings have no output tokens."""
        sums = Sums(requests=1, failed=int(run.error is not None), prompt_tokens=run.prompt_tokens)
        self._add(run.tenant, run.deployment_id, "", run.end_user, sums)

    def refresh(self) -> None:
        """Make the next batch, unless the last one is still to be stored; tell what was spent, with what is not
        stored yet.
        """
        if self._spent is not None:
            (day, tokens), self._spent = self._spent, None
            found = dict(tokens)
            for of, sums in (*self._batch.items(), *self._now.items()):
                if of.day == day:
                    found[of.key] = found.get(of.key, 0) + sums.prompt_tokens + sums.output_tokens
            self._recorded((day - EPOCH).days, found)
        if not self._batch and self._now:
            self._batch, self._now = self._now, {}

    def batch(self) -> Mapping[UsageOf, Sums]:
        return self._batch

    def stored(self) -> None:
        self._batch = {}

    def spent(self, day: date, tokens: Mapping[str, int]) -> None:
        self._spent = day, tokens

    def _add(self, key: str, deployment: str, adapter: str, end_user: str, sums: Sums) -> None:
        sums.last_at = datetime.now(UTC)
        of = self._row(UsageOf(sums.last_at.date(), key, deployment, adapter, self._shown(end_user)))
        self._now.setdefault(of, Sums()).add(sums)

    def _row(self, of: UsageOf) -> UsageOf:
        """The row that counts: that of the other end users, once there are too many."""
        if of.day != self._day:
            self._day, self._known, self._users = of.day, set(), defaultdict(set)
        if of in self._known or not of.end_user:
            return of
        users = self._users[of.key]
        full = len(self._known) >= MAX_ROWS or (len(users) >= MAX_END_USERS and of.end_user not in users)
        if full:
            return of._replace(end_user=OTHERS)
        users.add(of.end_user)
        self._known.add(of)
        return of

    def _shown(self, end_user: str) -> str:
        if not end_user or self._end_users == "off":
            return ""
        if self._end_users == "hash":
            return hmac.new(self._secret, end_user.encode(errors="replace"), hashlib.sha256).hexdigest()[:16]
        return "".join(each for each in end_user if each.isprintable())[:MAX_CHARACTERS]
