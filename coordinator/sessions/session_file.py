"""A file of kept sessions, with which they survive a restart of the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
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
_APPLICATION = 0x73706364  # "spcd": the file is one of ours
_PATIENCE_SECONDS = 2.0  # for a write, before the turn counts as unsaved and its generation ends without it
_TABLE = """
create table if not exists sessions (
    client text, session_id text, model text, last_used_at real, content blob, primary key (client, session_id)
)
"""


class SessionFile(SessionKeeper):
    """Keeps the sessions of one model at one coordinator, each as its last finished turn has left it.

    A turn is on disk before its generation ends, so a coordinator that is killed loses no finished turn. Where the disk
    fails, generations continue, and the session stays in memory alone; the file forgets it when the disk works again.

    The file has prompts and answers: only its owner may read it, and what is forgotten is overwritten.
    """

    def __init__(self, path: Path, on_failure: Callable[[], None] = lambda: None) -> None:
        """Open the file. `on_failure` is called for each unsaved turn.

        Raises StartupError if it is in use by another coordinator, or is no such file.
        """
        self._path, self._on_failure = path.absolute(), on_failure
        self._model = ""
        self._stale: set[tuple[str, str]] = set()  # sessions whose rows are wrong, by client and id
        self._thread = ThreadPoolExecutor(1, "session-file")
        self._lock: FileLock | None = None
        try:
            with self._explained():
                self._create()
                self._lock = FileLock(f"{self._path.resolve()}.lock", thread_local=False)
                self._lock.acquire(timeout=0)
                self._database = self._thread.submit(self._open).result()
        except StartupError:
            self._end()
            raise

    def load(self, model: str) -> list[KeptSession]:
        """Return the sessions of a model, by its fingerprint, and forget the others. Raises StartupError.

        The least recently used come first. From now on the file keeps this model's sessions.
        """
        self._model = model
        with self._explained():
            return self._thread.submit(self._load).result()

    def load_all(self) -> list[KeptSession]:
        """Return the sessions of all models, as `load` does, before it is known which model there is."""
        with self._explained():
            return self._thread.submit(self._read).result()

    def rename_model(self, model: str) -> None:
        """Let the sessions in the file be those of another model with the same tokens, by its fingerprint."""
        self._model = model
        self._thread.submit(self._database.execute, "update sessions set model = ?", (model,))

    async def save(self, session: KeptSession) -> None:
        """Write the session, and wait until it is written, or for two seconds."""
        session = replace(session)  # another turn can begin during the wait
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await asyncio.get_running_loop().run_in_executor(self._thread, self._write, session)
        except (OSError, sqlite3.Error, TimeoutError, ValueError) as error:
            log.warning("a turn is kept in memory alone", path=str(self._path), error=str(error) or "it takes too long")
            self._on_failure()

    async def delete(self, session: KeptSession) -> None:
        """Delete a session, and wait until it is deleted: its client must not find it again after a crash."""
        if not session.busy:
            await asyncio.get_running_loop().run_in_executor(
                self._thread, self._forget, (session.client, session.session_id)
            )

    def forget(self, session: KeptSession) -> None:
        """Delete a session soon, if it is there."""
        if session.num_turns:
            self._thread.submit(self._forget, (session.client, session.session_id))

    async def close(self) -> None:
        """Finish all writes."""
        self._thread.submit(self._database.close)
        await asyncio.to_thread(self._end)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Timeout as error:
            raise StartupError(
                f"the session file {self._path} is in use by another coordinator: name another one with --session-file"
            ) from error
        except (OSError, sqlite3.Error) as error:
            raise StartupError(
                f"the session file {self._path} cannot be used ({error}): name another one with --session-file, or "
                "remove this one if it is a damaged session file"
            ) from error

    def _end(self) -> None:
        self._thread.shutdown()
        if self._lock is not None:
            self._lock.release()

    def _create(self) -> None:
        """Create the file if it is missing. Only its owner can read it."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        if not self._path.is_file():
            raise OSError("it is not a file")

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, isolation_level=None)
        (application,) = database.execute("pragma application_id").fetchone()
        (version,) = database.execute("pragma user_version").fetchone()
        is_empty = not database.execute("select count(*) from sqlite_master").fetchone()[0]
        if application != _APPLICATION and not (is_empty and not application):
            raise sqlite3.DatabaseError("it is a database of something else")
        if version not in {0, _FORMAT}:
            raise sqlite3.DatabaseError(f"it has format {version}, and this specd reads {_FORMAT}")
        # In this journal a commit survives the end of the process, and the machine's up to the last moments.
        settings = ("journal_mode = wal", "synchronous = normal", "secure_delete = on")
        for pragma in (*settings, f"application_id = {_APPLICATION}", f"user_version = {_FORMAT}"):
            database.execute(f"pragma {pragma}")
        database.execute(_TABLE)
        return database

    def _load(self) -> list[KeptSession]:
        self._database.execute("delete from sessions where model != ?", (self._model,))
        return self._read()

    def _read(self) -> list[KeptSession]:
        sessions = []
        for client, session_id, content in self._database.execute(
            "select client, session_id, content from sessions order by last_used_at"
        ).fetchall():
            try:
                sessions.append(unpack(session_id, client, content))
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                log.warning("a kept session is damaged, and forgotten", session_id=session_id, error=repr(error))
                self._delete({(client, session_id)})
        return sessions

    def _write(self, session: KeptSession) -> None:
        key = session.client, session.session_id
        self._stale.add(key)  # until it is written, its row is that of an earlier turn
        self._database.execute(
            "insert or replace into sessions values (?, ?, ?, ?, ?)",
            (*key, self._model, session.last_used_at, pack(session)),
        )
        self._stale.discard(key)
        self._delete(self._stale)

    def _forget(self, key: tuple[str, str]) -> None:
        self._stale.add(key)
        try:
            self._delete(self._stale)
        except sqlite3.Error as error:
            log.warning("cannot forget a session in its file yet", path=str(self._path), error=str(error))

    def _delete(self, keys: set[tuple[str, str]]) -> None:
        if not keys:
            return
        self._database.executemany("delete from sessions where client = ? and session_id = ?", [*keys])
        keys.clear()
        self._database.execute("pragma wal_checkpoint(truncate)")  # which has the text, too
