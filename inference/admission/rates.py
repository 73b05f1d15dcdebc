"""Rates and quotas of API keys: requests and tokens a minute, tokens a day. It asks nobody, so no request waits for it.

The buckets of a minute refill steadily. Tokens are charged when a request ends, for only then are they known: no stream is cut, the
balance may go below zero, and later requests are refused until it is above. A day is one of UTC. The answers tell the balances in
OpenAI's headers. What a process knows is its own charges; `shared_rates` tells it those of others, or else the
record of usage what all spent today.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inference.errors import QuotaExhausted, RateLimited

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from management.snapshot import ApiKeyEntry, KeyLimits

    Headers = list[tuple[bytes, bytes]]

MINUTE_S, DAY_S = 60.0, 86400.0
STALE_S = 5.0
"""After so many seconds without a request what is known of a key is old."""


@dataclass(slots=True)
class Charge:
    """What was charged to a key."""

    requests: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Account:
    """One key: what is left of the minute, and what was spent on a day (counted from 1970)."""

    limits: KeyLimits
    requests: float
    tokens: float
    at: float
    day: int = 0
    spent: int = 0
    untold: Charge = field(default_factory=Charge)
    """What was charged here since others were told last."""
    asked_at: float = -math.inf
    """When a request of this key came last, in monotonic seconds."""


class RateMeter:
    """The accounts of the keys that have limits. Without limits a key has no account."""

    def __init__(
        self, monotonic: Callable[[], float] = time.monotonic, unix_time: Callable[[], float] = time.time
    ) -> None:
        self._monotonic, self._unix_time = monotonic, unix_time
        self._accounts: dict[str, Account] = {}
        self._recorded: tuple[int, Mapping[str, int]] = (0, {})
        """A day (counted from 1970), and what keys spent on it."""
        self.copies = 1
        """How often a charge counts here: while the other processes' charges are unknown, they are taken to be as large as this one's."""
        self.on_news: Callable[[], None] = lambda: None
        """Called when there is something to tell others, or to ask them."""

    def check(self, key: ApiKeyEntry | None) -> None:
        """Raise RateLimited or QuotaExhausted if `admit` would; charges nothing."""
        if key is not None and (account := self._account(key)) is not None:
            self._check(account)

    def admit(self, key: ApiKeyEntry | None) -> None:
        """Charge a request; raises RateLimited or QuotaExhausted."""
        if key is not None and self._account(key) is not None:
            self.admit_again(key.prefix)

    def admit_again(self, tenant: str) -> None:
        """Charge a further request of a call that was admitted before, as on a stream of requests; raises as `admit` does."""
        account = self._accounts.get(tenant)
        if account is not None:
            self._refill(account)
            self._check(account)
            account.untold.requests += 1
            if account.limits.requests_per_minute:
                account.requests -= self.copies
            self.on_news()

    def charge(self, tenant: str, tokens: int) -> None:
        """A request of this tenant ended, with so many tokens of prompts and outputs."""
        account = self._accounts.get(tenant)
        if account is not None:
            self._refill(account)
            account.untold.tokens += tokens
            if account.limits.tokens_per_minute:
                account.tokens -= self.copies * tokens
            account.spent += self.copies * tokens
            self.on_news()

    def active(self, within_s: float) -> list[tuple[str, Account]]:
        """The accounts, as they are now, that were asked for in the last seconds or have charges that were not told."""
        since = self._monotonic() - within_s
        found = [
            (name, each) for name, each in self._accounts.items() if each.asked_at >= since or each.untold != Charge()
        ]
        for _, account in found:
            self._refill(account)
        return found

    def told(self, tenant: str, told: Charge, requests: float, tokens: float, day: int, spent: int) -> None:
        """Others have been told of these charges, after which the balances of all processes together are these."""
        account = self._accounts.get(tenant)
        if account is None:
            return
        self._refill(account)
        untold, limits = account.untold, account.limits
        untold.requests, untold.tokens = untold.requests - told.requests, untold.tokens - told.tokens
        account.requests = requests - untold.requests if limits.requests_per_minute else 0.0
        account.tokens = tokens - untold.tokens if limits.tokens_per_minute else 0.0
        if day >= account.day:
            account.day, account.spent = day, spent + untold.tokens

    def recorded(self, day: int, spent: Mapping[str, int]) -> None:
        """What keys spent on a day (counted from 1970), by all processes and before a restart."""
        self._recorded = day, spent
        for tenant, account in self._accounts.items():
            self._refill(account)
            if account.day == day:
                account.spent = spent.get(tenant, account.spent)

    def headers(self, key: ApiKeyEntry | None) -> Headers:
        """The key's limits and balances, as OpenAI's clients read them; none for a key without limits a minute."""
        account = None if key is None else self._account(key)
        if account is None:
            return []
        limits = account.limits
        return [
            *_balance(b"requests", limits.requests_per_minute, account.requests),
            *_balance(b"tokens", limits.tokens_per_minute, account.tokens),
        ]

    def _account(self, key: ApiKeyEntry) -> Account | None:
        limits, now = key.limits, self._monotonic()
        if not limits.limited:
            self._accounts.pop(key.prefix, None)
            return None
        account = self._accounts.get(key.prefix)
        if account is None:
            account = Account(limits, limits.requests_per_minute, limits.tokens_per_minute, now)
            self._accounts[key.prefix] = account
            day, spent = self._recorded
            account.day, account.spent = day, spent.get(key.prefix, 0)
        if account.limits != limits:  # a limit that is new begins with a full bucket
            before, account.limits = account.limits, limits
            account.requests = account.requests if before.requests_per_minute else limits.requests_per_minute
            account.tokens = account.tokens if before.tokens_per_minute else limits.tokens_per_minute
        asked_at, account.asked_at = account.asked_at, now
        if now - asked_at > STALE_S:
            self.on_news()
        self._refill(account)
        return account

    def _refill(self, account: Account) -> None:
        now, day, limits = self._monotonic(), int(self._unix_time() // DAY_S), account.limits
        minutes, account.at = (now - account.at) / MINUTE_S, now
        most_requests, most_tokens = limits.requests_per_minute, limits.tokens_per_minute
        account.requests = min(most_requests, account.requests + minutes * most_requests)
        account.tokens = min(most_tokens, account.tokens + minutes * most_tokens)
        if day != account.day:
            account.day, account.spent = day, 0

    def _check(self, account: Account) -> None:
        limits = account.limits
        if limits.tokens_per_day and account.spent >= limits.tokens_per_day:
            left_s = DAY_S - self._unix_time() % DAY_S
            error = QuotaExhausted(
                f"This API key has used its {limits.tokens_per_day:,} tokens of today. The limit resets at 00:00 UTC, "
                f"in {int(left_s // 3600)} h {int(left_s % 3600 // 60)} min."
            )
            error.retry_after_s = left_s
            raise error
        if limits.requests_per_minute and account.requests < 1:
            raise _limited("requests", limits.requests_per_minute, 1 - account.requests)
        if limits.tokens_per_minute and account.tokens <= 0:
            raise _limited("tokens", limits.tokens_per_minute, 1 - account.tokens)


def _limited(what: str, per_minute: int, missing: float) -> RateLimited:
    error = RateLimited(f"Rate limit reached for this API key: {per_minute} {what} a minute.")
    error.retry_after_s = missing / per_minute * MINUTE_S
    return error


def _balance(what: bytes, per_minute: int, left: float) -> Headers:
    if not per_minute:
        return []
    full_s = (per_minute - left) / per_minute * MINUTE_S
    return [
        (b"x-ratelimit-limit-" + what, b"%d" % per_minute),
        (b"x-ratelimit-remaining-" + what, b"%d" % max(0, math.floor(left))),
        (b"x-ratelimit-reset-" + what, span(full_s).encode()),
    ]


def span(seconds: float) -> str:
    """A duration as OpenAI writes it: 17ms, 8s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(max(seconds, 0.0) * 1e3)}ms"
    whole = math.ceil(seconds)
    return f"{whole}s" if whole < 60 else f"{whole // 60}m{whole % 60}s"
