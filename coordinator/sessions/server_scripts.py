"""Scripts on a Valkey or Redis server, by which several coordinators agree."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, cast

from redis.asyncio import Redis
from redis.commands.core import AsyncScript

# A coordinator renews its leases. Those of one that dies end after this time.
LEASE_SECONDS = 10.0
# Sets `now` to the server's clock, in milliseconds.
NOW = "local t = redis.call('TIME'); local now = t[1] * 1000 + math.floor(t[2] / 1000)"

_PATIENCE_SECONDS = 2.0


class ServerScripts:
    """A connection to a server, which runs each script at once, without another one in between."""

    def __init__(self, url: str) -> None:
        """Connect with the first script."""
        self.redis = Redis.from_url(url, socket_timeout=_PATIENCE_SECONDS, socket_connect_timeout=_PATIENCE_SECONDS)
        self._registered: dict[str, AsyncScript] = {}
        self._running: set[asyncio.Future[None]] = set()

    async def run(self, script: str, keys: Sequence[str], *arguments: object) -> Any:
        """Return the answer of a script. Raises RedisError where the server is away."""
        if script not in self._registered:
            self._registered[script] = self.redis.register_script(script)
        return await self._registered[script](keys=[*keys], args=cast(Sequence[Any], arguments))

    def run_soon(self, running: Coroutine[Any, Any, None]) -> None:
        """Run what no caller waits for."""
        future = asyncio.ensure_future(running)
        self._running.add(future)
        future.add_done_callback(self._running.discard)

    async def finish(self) -> None:
        """Wait for what runs now."""
        await asyncio.gather(*self._running, return_exceptions=True)

    async def close(self) -> None:
        """Finish, and close the connection."""
        await self.finish()
        await self.redis.aclose()
