"""A file of kept sessions, with which they survive a restart of the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import structlog
from filelock import FileLock, Timeout

from coordinator.sessions.saved_session import pack, unpack
from coordinator.sessions.session_keeper import SessionKeeper
from coordinator.sessions.session_store import KeptSession
from specd.errors import StartupError

log = structlog.get_logger()

_FORMAT = 1
_PATIENCE_SECONDS = 2.0  # for a write, before the turn counts as unsaved and its generation ends without it
_TABLE = """
create table if not exists sessions (
    client text, session_id text, model text, last_used_at real, content blob, primary key (client, session_id)
) without rowid
"""


class SessionFile(SessionKeeper):
    """Keeps the sessions of one model at one coordinator, each as its last finished turn has left it.

    A turn is on disk before its generation ends, so a coordinator that is killed loses no finished turn. Where the disk
    fails, generations continue, and the coordinator keeps the session in memory alone.

    The file has prompts and answers: only its owner may read it, and what is forgotten is overwritten.
    """

    def __init__(self, path: Path, model: str, on_failure: Callable[[], None] = lambda: None) -> None:
        """Open the file for the sessions of a model, by its fingerprint. `on_failure` is called for each unsaved turn.

        Raises StartupError if it is in use by another coordinator, or cannot be used as such a file.
        """
        self._path, self._model, self._on_failure = path, model, on_failure
        self._lock = FileLock(f"{path}.lock")
        self._thread = ThreadPoolExecutor(1, "session-file")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.chmod(0o600)
            self._lock.acquire(timeout=0)
            self._database = self._thread.submit(self._open).result()
        except Timeout as error:
            self._thread.shutdown()
            raise StartupError(
                f"the session file {path} is in use by another coordinator: name another one with --session-file"
            ) from error
        except (OSError, sqlite3.Error) as error:
            self._end()
            raise StartupError(
                f"the session file {path} cannot be used ({error}): remove it, or name another one with --session-file"
            ) from error

    def load(self) -> list[KeptSession]:
        """Return the sessions of the model, the least recently used first, and forget those of others."""
        return self._thread.submit(self._load).result()

    async def save(self, session: KeptSession) -> None:
        """Write the session, and wait until it is written, or for two seconds."""
        session = replace(session)  # another turn can begin during the wait
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await asyncio.get_running_loop().run_in_executor(self._thread, self._write, session)
        except (OSError, sqlite3.Error, TimeoutError, ValueError) as error:
            log.warning("a turn is kept in memory alone", path=str(self._path), error=str(error) or "it takes too long")
            self._on_failure()

    def forget(self, session: KeptSession) -> None:
        """Delete a session soon, if it is there."""
        self._thread.submit(self._delete, session)

    async def close(self) -> None:
        """Finish all writes."""
        self._thread.submit(self._database.close)
        await asyncio.to_thread(self._thread.shutdown)
        self._lock.release()

    def _end(self) -> None:
        self._thread.shutdown()
        self._lock.release()

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, isolation_level=None)
        (version,) = database.execute("pragma user_version").fetchone()
        if version not in {0, _FORMAT}:
            raise sqlite3.DatabaseError(f"it has format {version}, and this specd reads {_FORMAT}")
        # In this journal a commit survives the end of the process, and the machine's up to the last moments.
        for pragma in ("journal_mode = wal", "synchronous = normal", "secure_delete = on", f"user_version = {_FORMAT}"):
            database.execute(f"pragma {pragma}")
        database.execute(_TABLE)
        for side_file in self._path.parent.glob(f"{self._path.name}-*"):  # of the journal
            with contextlib.suppress(OSError):
                side_file.chmod(0o600)
        return database

    def _load(self) -> list[KeptSession]:
        self._database.execute("delete from sessions where model != ?", (self._model,))
        sessions = []
        for client, session_id, content in self._database.execute(
            "select client, session_id, content from sessions order by last_used_at"
        ).fetchall():
            try:
                sessions.append(unpack(session_id, client, content))
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                log.warning("a kept session is damaged, and forgotten", session_id=session_id, error=repr(error))
                self._delete(KeptSession(session_id, client, 0.0, 0.0, 0.0))
        return sessions

    def _write(self, session: KeptSession) -> None:
        self._database.execute(
            "insert or replace into sessions values (?, ?, ?, ?, ?)",
            (session.client, session.session_id, self._model, session.last_used_at, pack(session)),
        )

    def _delete(self, session: KeptSession) -> None:
        try:
            self._database.execute(
                "delete from sessions where client = ? and session_id = ?", (session.client, session.session_id)
            )
        except sqlite3.Error as error:
            log.warning("cannot forget a session in its file", path=str(self._path), error=str(error))
