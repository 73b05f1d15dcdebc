"""Rates and quotas that all web processes count together, through a ledger that they share.

The request path asks nobody: a request is charged here at once, and the ledger hears of it within some hundredths of a second, when
it also says what others have charged. While the ledger is away each process counts its own charges once for every process that it
knew, so that all of them together stay within the limits.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import structlog

from inference.admission.rates import MINUTE_S, Charge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inference.admission.rates import Account, RateMeter
    from management.snapshot import KeyLimits

logger = structlog.get_logger(__name__)

EVERY_S = 0.05
"""Least seconds between two exchanges."""
LOOK_EVERY_S = 1.0
"""Most seconds between two exchanges, and those until a ledger that was away is tried again."""


class LedgerAway(Exception):
    """The ledger does not answer, or refuses; the text says why, without secrets."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a process charged to a key, and the balances that it knew of before, for a ledger that has lost its own."""

    tenant: str
    limits: KeyLimits
    charged: Charge
    requests: float
    tokens: float
    day: int
    spent: int


@dataclass(frozen=True, slots=True)
class Balance:
    """What is left to all processes together, and the tokens that they spent on a day (counted from 1970)."""

    requests: float
    tokens: float
    day: int
    spent: int


class Ledger(Protocol):
    """Where processes meet."""

    async def exchange(self, entries: Sequence[Entry]) -> tuple[int, list[Balance]]:
        """Record the charges; the number of processes that came lately, this one included, and the balance of each entry. Raises
        LedgerAway.
        """

    async def close(self) -> None:
        """End the connection."""


class SharedRates:
    """Keeps one process's meter and the ledger equal."""

    def __init__(self, meter: RateMeter, ledger: Ledger) -> None:
        self._meter, self._ledger = meter, ledger
        self.reachable = True
        """Whether the ledger answered when it was last asked."""
        self._processes = 1
        self._news = asyncio.Event()
        meter.on_news = self._news.set

    async def run(self) -> None:
        """Exchange for as long as the process serves."""
        try:
            while True:
                await self.exchange()
                await asyncio.sleep(EVERY_S if self.reachable else LOOK_EVERY_S)
                # Not wait_for, which in Python 3.11 loses a cancellation that arrives together with the event.
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._news.wait()
        finally:
            await self._ledger.close()

    async def exchange(self) -> None:
        """Tell the ledger what was charged, and take over its balances."""
        self._news.clear()
        entries = [self._entry(tenant, account) for tenant, account in self._meter.active(MINUTE_S)]
        try:
            processes, balances = await self._ledger.exchange(entries)
        except LedgerAway as error:
            if self.reachable:
                logger.warning("rates are counted without the others", reason=str(error), processes=self._processes)
            self.reachable, self._meter.copies = False, self._processes
            return
        if not self.reachable:
            logger.info("rates are counted together again", processes=processes)
        self.reachable, self._meter.copies, self._processes = True, 1, processes
        for entry, balance in zip(entries, balances, strict=True):
            self._meter.told(entry.tenant, entry.charged, balance.requests, balance.tokens, balance.day, balance.spent)

    def _entry(self, tenant: str, account: Account) -> Entry:
        """Without its charges, and without those that others were only taken to have made."""
        untold, copies = account.untold, self._meter.copies
        return Entry(
            tenant,
            account.limits,
            replace(untold),
            account.requests + copies * untold.requests,
            account.tokens + copies * untold.tokens,
            account.day,
            max(account.spent - copies * untold.tokens, 0),
        )
