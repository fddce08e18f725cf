"""A Valkey or Redis server on which several coordinators keep sessions."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import Callable
from typing import Any, cast

import structlog
from redis.exceptions import RedisError

from coordinator.sessions.saved_session import pack, unpack
from coordinator.sessions.server_scripts import LEASE_SECONDS, NOW, ServerScripts
from coordinator.sessions.session_keeper import SessionKeeper
from coordinator.sessions.session_store import KeptSession, SessionStore, busy_error
from specd.errors import UnavailableError

log = structlog.get_logger()

_RETRY_SECONDS = 1.0

# A session is a hash: its content, the number of its turns, and the lease of the coordinator that runs a turn on it:
# a random token, and the time of its end by the server's clock in milliseconds. An index by client has its sessions by
# their last use. Each script is atomic, and of one slot of a cluster.
_IS_LEASED = "v[2] and v[2] ~= ARGV[1] and tonumber(v[3]) > now"
# KEYS: session. ARGV: token, lease ms, turns that are known. -> {'none'}, {'busy'} or {'taken', content or nil}
_TAKE = f"""{NOW}
local v = redis.call('HMGET', KEYS[1], 'turns', 'lease', 'until', 'content')
if not v[1] then return {{'none'}} end
if {_IS_LEASED} then return {{'busy'}} end
redis.call('HSET', KEYS[1], 'lease', ARGV[1], 'until', now + ARGV[2])
return {{'taken', v[1] ~= ARGV[3] and v[4]}}"""
# KEYS: session, index. ARGV: token, idle ms, turns, content, id, last use. -> 1, or 0 where another turn was kept since
_SAVE = """
local v = redis.call('HMGET', KEYS[1], 'turns', 'lease')
if ARGV[3] == '1' and v[1] or ARGV[3] ~= '1' and (not v[1] or v[2] ~= ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], 'turns', ARGV[3], 'content', ARGV[4])
redis.call('HDEL', KEYS[1], 'lease', 'until')
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('ZADD', KEYS[2], ARGV[6], ARGV[5])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return 1"""
# KEYS: session. ARGV: token, idle ms
_RELEASE = """
if redis.call('HGET', KEYS[1], 'lease') ~= ARGV[1] then return 0 end
redis.call('HDEL', KEYS[1], 'lease', 'until')
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1"""
# KEYS: session. ARGV: token, lease ms, idle ms
_RENEW = f"""{NOW}
if redis.call('HGET', KEYS[1], 'lease') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'until', now + ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[2] + ARGV[3])
return 1"""
# KEYS: session, index. ARGV: token, id. -> 1, or 0 while a turn runs
_DELETE = f"""{NOW}
local v = redis.call('HMGET', KEYS[1], 'turns', 'lease', 'until')
if {_IS_LEASED} then return 0 end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[2])
return 1"""


class SessionServer(SessionKeeper):
    """Keeps the sessions of one model for all coordinators that name the server; a coordinator's store is a copy.

    A turn on a session holds its lease, which is renewed while the turn runs. It is kept when it finishes, if no other
    turn has been kept since it began: a coordinator that was stopped for longer than its lease keeps nothing. Sessions
    expire by the server's clock. Where the server is away, generations continue, their turns are not kept, and requests
    that continue a session are refused.
    """

    def __init__(
        self,
        url: str,
        model: str,
        store: SessionStore,
        idle_seconds: float,
        on_failure: Callable[[], None] = lambda: None,
        *,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        """Keep the sessions of a model, by its fingerprint. `on_failure` is called for each turn that is not kept."""
        self.scripts = ServerScripts(url)
        self._model, self._store, self._on_failure = model, store, on_failure
        self._idle_ms, self._lease_seconds = max(round(1000 * idle_seconds), 1), lease_seconds
        self._leases: dict[tuple[str, str], str] = {}  # by client and session
        self._renewing = asyncio.ensure_future(self._renew())

    async def take(self, session_id: str, client: str) -> None:
        """Take the lease of a session, and its latest turn."""
        token, known = secrets.token_hex(16), self._store.peek(session_id, client)
        lease = round(1000 * self._lease_seconds)
        answer = await self._ask(_TAKE, client, session_id, token, lease, known.num_turns if known else "none")
        match answer[0]:
            case b"none":
                self._store.drop(session_id, client)
            case b"busy":
                raise busy_error(session_id)
            case _:
                self._leases[client, session_id] = token
                if answer[1]:
                    self._restore(client, {session_id: answer[1]})

    async def save(self, session: KeptSession) -> None:
        """Keep a turn, if no other turn was kept since it began; the store forgets a session that is not kept."""
        client, session_id = session.client, session.session_id
        token = self._leases.pop((client, session_id), "")
        try:
            score = round(session.last_used_at * 1e3)
            content = pack(session)
            is_kept = await self._ask(
                _SAVE, client, session_id, token, self._idle_ms, session.num_turns, content, session_id, score
            )
            why = "another coordinator has kept a turn of the session since this one began"
        except UnavailableError as error:
            is_kept, why = 0, str(error)
        if not is_kept:
            log.warning("a turn is not kept", session_id=session_id, why=why)
            self._on_failure()
            self._store.drop(session_id, client)

    def release(self, session_id: str, client: str) -> None:
        """Give the lease back."""
        token = self._leases.pop((client, session_id), "")
        if token:
            self.scripts.run_soon(self._release(client, session_id, token))

    async def refresh(self, client: str, session_id: str | None = None) -> None:
        """Bring the store up to date."""
        try:
            if session_id is None:
                found = await cast(Any, self.scripts.redis.zrange(self._index(client), 0, -1))
                ids = [each.decode() for each in found]
            else:
                ids = [session_id]
            pipeline = self.scripts.redis.pipeline(transaction=False)
            for each in ids:
                pipeline.hmget(self._key(client, each), ["turns", "content"])
            values = dict(zip(ids, await pipeline.execute(), strict=True))
        except RedisError as error:
            raise self._unavailable(error) from error
        changed = {}
        for each, (turns, content) in values.items():
            known = self._store.peek(each, client)
            if turns is None:
                self._store.drop(each, client)
            elif known is None or known.num_turns != int(turns):
                changed[each] = content
        self._restore(client, changed)
        if session_id is None:
            for known in self._store.list(client):
                if known.session_id not in values:
                    self._store.drop(known.session_id, client)

    async def delete(self, session: KeptSession) -> None:
        """Delete a session. Raises ConflictError (SESSION_BUSY) while another coordinator runs a turn on it."""
        client, session_id = session.client, session.session_id
        if not session.busy and not await self._ask(_DELETE, client, session_id, "", session_id):
            raise busy_error(session_id)

    async def close(self) -> None:
        """Give all leases back."""
        self._renewing.cancel()
        await asyncio.gather(self._renewing, return_exceptions=True)
        await self.scripts.close()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_seconds / 3)
            for (client, session_id), token in tuple(self._leases.items()):
                with contextlib.suppress(UnavailableError):
                    lease = round(1000 * self._lease_seconds)
                    await self._ask(_RENEW, client, session_id, token, lease, self._idle_ms)

    async def _release(self, client: str, session_id: str, token: str) -> None:
        with contextlib.suppress(UnavailableError):  # it ends by itself
            await self._ask(_RELEASE, client, session_id, token, self._idle_ms)

    async def _ask(self, script: str, client: str, session_id: str, *arguments: object) -> Any:
        try:
            keys = [self._key(client, session_id), self._index(client)]
            return await self.scripts.run(script, keys, *arguments)
        except RedisError as error:
            raise self._unavailable(error) from error

    def _restore(self, client: str, contents: dict[str, bytes]) -> None:
        sessions = []
        for session_id, content in contents.items():
            try:
                sessions.append(unpack(session_id, client, content))
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                log.warning("a kept session is damaged", session_id=session_id, error=repr(error))
                self._store.drop(session_id, client)
        sessions.sort(key=lambda each: each.last_used_at)
        self._store.restore(sessions)

    def _unavailable(self, error: RedisError) -> UnavailableError:
        log.warning("the session server does not answer", error=repr(error))
        return UnavailableError(
            "SESSION_SERVER",
            "the server that keeps sessions does not answer: try again, or send the whole prompt without a session",
            retry_after_seconds=_RETRY_SECONDS,
        )

    def _index(self, client: str) -> str:
        """Return the key of a client's index; the braces put all keys of a client into one slot of a cluster."""
        digest = hashlib.sha256(f"{self._model} {client}".encode()).hexdigest()[:32]
        return f"specd:{{{digest}}}"

    def _key(self, client: str, session_id: str) -> str:
        return f"{self._index(client)}:{session_id}"
