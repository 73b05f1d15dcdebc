"""A ledger of rates in Redis: a hash for each API key, and the processes that came lately.

Redis has the balances and its own clock, so that the processes' clocks need not agree. It is an accelerator: it may be emptied or away at
any time. One server, or a primary with replicas; no Redis Cluster, whose scripts may not touch keys of several slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from inference.admission.shared_rates import Balance, LedgerAway

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inference.admission.shared_rates import Entry

TIMEOUT_S = 1.0
PRESENT_S = 5.0
"""A process that has not come for so many seconds has ended."""
KEPT_S = 2 * 86400
"""Seconds after which a key that nobody used is forgotten: its day is over, and its buckets are full."""
AT_ONCE = 500
"""Entries of one script: nobody else is served while it runs."""
PROCESSES, BALANCES = "dragoman:processes", "dragoman:rates:"
EXCHANGE = """
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1000000
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[2])
local answer = {redis.call('ZCARD', KEYS[1])}
local function left(stored, minutes, limit, known, charged)
  if limit == 0 then return '' end
  local before = tonumber(stored or '')
  if before then before = before + minutes * limit else before = known end
  return string.format('%.6f', math.min(limit, before) - charged)
end
for i = 2, #KEYS do
  local entry = {}
  for j = 1, 8 do entry[j] = tonumber(ARGV[3 + (i - 2) * 8 + j]) end
  local held = redis.call('HMGET', KEYS[i], 'at', 'requests', 'tokens', 'day', 'spent')
  local minutes = held[1] and math.max(0, now - held[1]) / 60 or 0
  local requests = left(held[2], minutes, entry[1], entry[3], entry[5])
  local tokens = left(held[3], minutes, entry[2], entry[4], entry[6])
  local day, spent = entry[7], entry[8]
  if held[4] and tonumber(held[4]) >= day then day, spent = tonumber(held[4]), tonumber(held[5]) end
  spent = spent + entry[6]
  redis.call('HSET', KEYS[i], 'at', now, 'requests', requests, 'tokens', tokens, 'day', day, 'spent', spent)
  redis.call('EXPIRE', KEYS[i], ARGV[3])
  answer[i] = {requests, tokens, day, spent}
end
return answer
"""
"""KEYS: the processes, then the entries' hashes. ARGV: this process, PRESENT_S, KEPT_S, then for each entry its limits a minute of requests and
of tokens (0: none), the balances that it knew of these, what it charged of these, its day, and what it knew to be spent on that.
"""


class RedisLedger:
    """One process's connection. `url` is redis://, rediss:// or unix://; raises ValueError for others."""

    def __init__(self, url: str, process: str) -> None:
        """`process` is a name that no other process has."""
        self._process = process
        self._redis = Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )

    async def exchange(self, entries: Sequence[Entry]) -> tuple[int, list[Balance]]:
        """See `Ledger`. With no entries it only says that this process is there."""
        processes, balances = 1, []
        for start in range(0, max(len(entries), 1), AT_ONCE):
            processes, found = await self._run(entries[start : start + AT_ONCE])
            balances += found
        return processes, balances

    async def ping(self) -> None:
        """Raise LedgerAway unless Redis answers and lets this process in."""
        try:
            await self._redis.ping()
        except (RedisError, OSError) as error:
            raise LedgerAway(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """See `Ledger`."""
        await self._redis.aclose()

    async def _run(self, entries: Sequence[Entry]) -> tuple[int, list[Balance]]:
        keys = [PROCESSES, *(BALANCES + entry.tenant for entry in entries)]
        arguments: list[str | float] = [self._process, PRESENT_S, KEPT_S]
        for each in entries:
            limits, charged = each.limits, each.charged
            arguments += [limits.requests_per_minute, limits.tokens_per_minute, each.requests, each.tokens]
            arguments += [charged.requests, charged.tokens, each.day, each.spent]
        try:
            processes, *rows = await self._redis.eval(EXCHANGE, len(keys), *keys, *arguments)  # type: ignore[misc]
        except (RedisError, OSError) as error:
            raise LedgerAway(f"{type(error).__name__}: {error}") from error
        return processes, [
            Balance(float(requests or 0), float(tokens or 0), day, spent) for requests, tokens, day, spent in rows
        ]
