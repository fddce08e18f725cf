"""A file of kept sessions, with which they survive a restart of the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import structlog
from filelock import FileLock, Timeout

from coordinator.sessions.session_store import KeptSession
from specd.errors import StartupError
from specd.text.chat import Chat

log = structlog.get_logger()

_FORMAT = 1
_PATIENCE_SECONDS = 2.0  # for a write, before the turn counts as unsaved and its generation ends without it
_TABLE = """
create table if not exists sessions (
    client text, session_id text, model text, created_at real, last_used_at real, num_turns integer,
    token_ids blob, source blob, chat text, primary key (client, session_id)
) without rowid
"""


class SessionFile:
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
            self._release()
            raise StartupError(
                f"the session file {path} cannot be used ({error}): remove it, or name another one with --session-file"
            ) from error

    def load(self) -> list[KeptSession]:
        """Return the sessions of the model, the least recently used first, and forget those of others."""
        return self._thread.submit(self._load).result()

    async def save(self, session: KeptSession) -> None:
        """Write the session as its last turn has left it, and wait until it is written, or for two seconds."""
        row = (
            session.client,
            session.session_id,
            self._model,
            session.created_at,
            session.last_used_at,
            session.num_turns,
            session.token_ids,
            session.source,
            session.chat,
        )
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await asyncio.get_running_loop().run_in_executor(self._thread, self._write, row)
        except (OSError, sqlite3.Error, TimeoutError, ValueError) as error:
            log.warning("a turn is kept in memory alone", path=str(self._path), error=str(error) or "it takes too long")
            self._on_failure()

    def forget(self, session: KeptSession) -> None:
        """Delete a session soon, if it is there."""
        self._thread.submit(self._delete, [(session.client, session.session_id)])

    def close(self) -> None:
        """Finish all writes."""
        self._thread.submit(self._database.close)
        self._release()

    def _release(self) -> None:
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
        rows = self._database.execute(
            "select client, session_id, created_at, last_used_at, num_turns, token_ids, source, chat from sessions "
            "order by last_used_at"
        ).fetchall()
        return [*self._sessions(rows)]

    def _sessions(self, rows: Iterable[tuple[Any, ...]]) -> Iterator[KeptSession]:
        for client, session_id, created_at, last_used_at, num_turns, token_ids, source, chat in rows:
            try:
                yield KeptSession(
                    session_id,
                    client,
                    created_at,
                    last_used_at,
                    idle_since=0.0,
                    token_ids=_tokens_from(token_ids),
                    chat=_chat_from(chat),
                    source=_tokens_from(source),
                    num_turns=num_turns,
                )
            except (ValueError, TypeError, LookupError) as error:
                log.warning("a kept session is damaged, and forgotten", session_id=session_id, error=str(error))
                self._delete([(client, session_id)])

    def _write(self, row: tuple[Any, ...]) -> None:
        *values, token_ids, source, chat = row
        text = json.dumps(_chat_as_json(chat)) if chat is not None else None
        self._database.execute(
            "insert or replace into sessions values (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*values, token_ids.tobytes(), source.tobytes(), text),
        )

    def _delete(self, keys: list[tuple[str, str]]) -> None:
        try:
            self._database.executemany("delete from sessions where client = ? and session_id = ?", keys)
        except sqlite3.Error as error:
            log.warning("cannot forget a session in its file", path=str(self._path), error=str(error))


def _tokens_from(data: bytes) -> array[int]:
    tokens = array("I")
    tokens.frombytes(data)
    return tokens


def _chat_as_json(chat: Chat) -> dict[str, Any]:
    return {
        "messages": [dict(message) for message in chat.messages],
        "tools": [dict(tool) for tool in chat.tools],
        "template_arguments": dict(chat.template_arguments),
        "special_tokens": {str(number): tokens for number, tokens in chat.special_tokens.items()},
    }


def _chat_from(text: str | None) -> Chat | None:
    if text is None:
        return None
    value = json.loads(text)
    placed = {
        int(number): tuple((int(position), int(token_id)) for position, token_id in tokens)
        for number, tokens in value["special_tokens"].items()
    }
    return Chat(tuple(value["messages"]), tuple(value["tools"]), value["template_arguments"], special_tokens=placed)
