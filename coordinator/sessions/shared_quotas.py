"""Limits of clients that hold at several coordinators together, by counts on their session server."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import structlog
from redis.exceptions import RedisError

from coordinator.sessions.quota import Quotas, sessions_error, tokens_error
from coordinator.sessions.server_scripts import LEASE_SECONDS, NOW, ServerScripts
from specd.caller import CallerLimits

log = structlog.get_logger()

_RETRY_SECONDS = 2.0

# A client has an account, a hash with its tokens and the time at which they were counted, and a set of its requests by
# the ends of their leases. Times are milliseconds of the server's clock. An account that is full again is not kept.
_FUNCTION = """
local function use(limit, tokens)
  local v = redis.call('HMGET', KEYS[1], 'balance', 'at')
  local balance = limit
  if v[1] then balance = math.min(v[1] + (now - v[2]) * limit / 60000, limit) end
  balance = balance - tokens
  if tokens > 0 then
    redis.call('HSET', KEYS[1], 'balance', string.format('%.3f', balance), 'at', string.format('%.0f', now))
    redis.call('PEXPIRE', KEYS[1], math.ceil((limit - balance) * 60000 / limit))
  end
  return balance
end
"""
_ACCOUNT = NOW + _FUNCTION
# KEYS: account, requests. ARGV: tokens per minute and requests at a time, or '' without such a limit; id; lease ms.
# -> {'ok'}, {'tokens', balance} or {'sessions', number}
_BEGIN = f"""{_ACCOUNT}
if ARGV[1] ~= '' then
  local balance = use(tonumber(ARGV[1]), 0)
  if balance <= 0 then return {{'tokens', string.format('%.3f', balance)}} end
end
if ARGV[2] ~= '' then
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
  local number = redis.call('ZCARD', KEYS[2])
  if number >= tonumber(ARGV[2]) then return {{'sessions', tostring(number)}} end
  redis.call('ZADD', KEYS[2], now + ARGV[4], ARGV[3])
  redis.call('PEXPIRE', KEYS[2], ARGV[4])
end
return {{'ok'}}"""
# KEYS: account, requests. ARGV: tokens per minute, used tokens
_USE = f"{_ACCOUNT} use(tonumber(ARGV[1]), tonumber(ARGV[2]))"
# KEYS: account, requests. ARGV: id, lease ms
_RENEW = f"""{NOW}
redis.call('ZADD', KEYS[2], now + ARGV[2], ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[2])"""
# KEYS: account, requests. ARGV: id
_END = "redis.call('ZREM', KEYS[2], ARGV[1])"


class SharedQuotas(Quotas):
    """The limits of clients at all coordinators that name the server; each also holds at this one alone.

    Where the server is away, the limits are those of each coordinator.
    """

    def __init__(
        self,
        url: str,
        clock: Callable[[], float] = time.perf_counter,
        *,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        """`clock` returns seconds, for the limits at this coordinator."""
        super().__init__(clock)
        self.scripts = ServerScripts(url)
        self._lease_ms = round(1000 * lease_seconds)
        self._running: dict[str, str] = {}  # clients, by id of the request
        self._renewing = asyncio.ensure_future(self._renew())

    @asynccontextmanager
    async def held(self, client: str, limits: CallerLimits) -> AsyncGenerator[None]:
        """Count a client's request at all coordinators."""
        if limits.max_sessions is None and limits.tokens_per_minute is None:
            yield
            return
        request_id, most = secrets.token_hex(16), limits.max_sessions
        try:
            answer = await self._ask(
                _BEGIN, client, _or_empty(limits.tokens_per_minute), _or_empty(most), request_id, self._lease_ms
            )
            match answer:
                case [b"tokens", balance]:
                    raise tokens_error(limits.tokens_per_minute or 1, float(balance))
                case [b"sessions", number]:
                    raise sessions_error(int(number), _RETRY_SECONDS)
            if most is not None:
                self._running[request_id] = client
            yield
        finally:
            if most is not None:  # the server may have it, even if this request was cancelled before the answer
                self._running.pop(request_id, None)
                self.scripts.run_soon(self._ask(_END, client, request_id))

    def count(self, client: str, limits: CallerLimits, num_tokens: int) -> None:
        """Count used tokens at all coordinators, soon."""
        super().count(client, limits, num_tokens)
        if limits.tokens_per_minute is not None and num_tokens:
            self.scripts.run_soon(self._ask(_USE, client, limits.tokens_per_minute, num_tokens))

    async def close(self) -> None:
        """Finish all counts, and leave the server."""
        self._renewing.cancel()
        await asyncio.gather(self._renewing, return_exceptions=True)
        await self.scripts.close()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_ms / 3000)
            for request_id, client in tuple(self._running.items()):
                await self._ask(_RENEW, client, request_id, self._lease_ms)
                if request_id not in self._running:  # it ended during the wait
                    await self._ask(_END, client, request_id)

    async def _ask(self, script: str, client: str, *arguments: object) -> Any:
        """Return the answer of a script, or None where the server is away."""
        digest = hashlib.sha256(client.encode()).hexdigest()[:32]
        # The braces put both keys of a client into one slot of a cluster.
        keys = [f"specd:{{{digest}}}:{kind}" for kind in ("account", "requests")]
        with contextlib.suppress(RedisError):
            return await self.scripts.run(script, keys, *arguments)
        log.warning("the session server does not answer: limits of clients hold at each coordinator alone")
        return None


def _or_empty(limit: int | None) -> int | str:
    return "" if limit is None else limit
