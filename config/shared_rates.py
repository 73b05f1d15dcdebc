"""Rates that web processes count together, if `redis_url` is set. The package is that of the extra `redis`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference.admission.shared_rates import SharedRates

if TYPE_CHECKING:
    from config.options import Options
    from inference.admission.rates import RateMeter
    from inference.admission.redis_ledger import RedisLedger


class RedisMissing(ValueError):
    """The setting needs a package that is not installed."""


def ledger_of(url: str, process: str) -> RedisLedger:
    """Connects when it is first asked. Raises RedisMissing, or ValueError for an address that cannot be."""
    try:
        from inference.admission.redis_ledger import RedisLedger
    except ImportError as error:
        raise RedisMissing(f"DRAGOMAN_REDIS_URL: {error.name} is not installed; install dragoman[redis]") from error
    return RedisLedger(url, process)


def shared_rates_of(options: Options, meter: RateMeter, process: str) -> SharedRates | None:
    """What keeps the meter equal with those of other processes; None: nothing. Raises as `ledger_of` does."""
    url = options.redis_url.get_secret_value()
    return SharedRates(meter, ledger_of(url, process)) if url else None
