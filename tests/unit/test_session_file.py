"""Kept sessions in a file: as their last finished turn has left them, and only those."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import stat
import tempfile
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.sessions.session_file import SessionFile
from coordinator.sessions.session_store import KeptSession, SessionStore
from specd.errors import StartupError
from specd.text.chat import Chat

IDLE_SECONDS, BUDGET_TOKENS = 100.0, 60


class Kept:
    """A store with its file, which can be closed or killed, and begun again."""

    def __init__(self, path: Path, model: str = "m") -> None:
        self.path, self.now = path, 1_000_000.0
        self.model = model
        self.begin()

    def begin(self) -> None:
        self.file = SessionFile(self.path)
        # The steady clock starts at zero in each process.
        began_at = self.now
        self.store = SessionStore(IDLE_SECONDS, BUDGET_TOKENS, lambda: self.now, lambda: self.now - began_at)
        self.store.on_forget = self.file.forget
        self.store.restore(self.file.load(self.model))

    def restart(self) -> None:
        asyncio.run(self.file.close())
        self.begin()

    def turn(self, session_id: str, client: str, token_ids: list[int], chat: Chat | None = None) -> None:
        known = [each.session_id for each in self.store.list(client)]
        session = (self.store.acquire if session_id in known else self.store.begin)(session_id, client)
        self.store.finish(session, token_ids, chat)
        if self.store.has(session):
            asyncio.run(self.file.save(session))

    @property
    def contents(self) -> dict[str, list[Any]]:
        """The sessions of each client, the most recently used first, without what a restart changes."""
        return {
            client: [
                (each.session_id, list(each.token_ids), list(each.source), each.chat, each.num_turns, each.created_at)
                for each in self.store.list(client)
            ]
            for client in "ab"
        }


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    kept = Kept(tmp_path / "sessions.sqlite")
    yield kept
    asyncio.run(kept.file.close())


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(st.text(), values, max_size=3)
chats = st.builds(
    Chat,
    st.lists(objects, max_size=3).map(tuple),
    st.lists(objects, max_size=2).map(tuple),
    objects,
    special_tokens=st.dictionaries(
        st.integers(0, 5),
        st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=3).map(tuple),
        max_size=2,
    ),
)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=20)
events = st.lists(
    st.one_of(
        st.tuples(st.just("turn"), st.sampled_from("xyz"), st.sampled_from("ab"), tokens),
        st.tuples(st.just("delete"), st.sampled_from("xyz"), st.sampled_from("ab"), st.none()),
        st.tuples(st.just("begin"), st.sampled_from("xyz"), st.sampled_from("ab"), st.none()),
        st.tuples(st.just("time"), st.sampled_from("x"), st.sampled_from("a"), st.none()),
        st.tuples(st.just("restart"), st.sampled_from("x"), st.sampled_from("a"), st.none()),
    ),
    max_size=20,
)


@settings(max_examples=60)
@given(events)
def test_a_restart_changes_no_session(events: list[tuple[str, str, str, Any]]) -> None:
    """Forgotten ones stay forgotten, and a turn that had not ended leaves its session as it was."""
    with tempfile.TemporaryDirectory() as directory:
        kept = Kept(Path(directory) / "sessions.sqlite")
        running: dict[tuple[str, str], KeptSession] = {}
        for event, session_id, client, token_ids in events:
            known = {each.session_id for each in kept.store.list(client)}
            match event:
                case "turn" if (client, session_id) not in running:
                    kept.turn(session_id, client, token_ids)
                case "delete" if session_id in known and (client, session_id) not in running:
                    kept.store.delete(session_id, client)
                case "begin" if session_id in known and (client, session_id) not in running:
                    running[client, session_id] = kept.store.acquire(session_id, client)
                case "time":
                    kept.now += IDLE_SECONDS / 3
                case "restart":
                    for session in running.values():
                        kept.store.abandon(session)
                    running.clear()
                    before = kept.contents
                    kept.restart()
                    # An abandoned turn counted as a use, so the order can differ.
                    assert {k: sorted(v, key=repr) for k, v in kept.contents.items()} == {
                        k: sorted(v, key=repr) for k, v in before.items()
                    }
        asyncio.run(kept.file.close())


@settings(max_examples=50)
@given(chats, tokens, tokens)
def test_a_conversation_is_kept_as_it_is(chat: Chat, token_ids: list[int], source: list[int]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        file = SessionFile(Path(directory) / "sessions")
        file.load("m")
        session = KeptSession("s", "c", 1.0, 2.0, 0.0, array("I", token_ids), chat, array("I", source), num_turns=3)
        asyncio.run(file.save(session))
        (loaded,) = file.load("m")
        asyncio.run(file.close())
    assert (loaded.chat, list(loaded.token_ids), list(loaded.source)) == (chat, token_ids, source)
    assert (loaded.session_id, loaded.client, loaded.created_at, loaded.last_used_at) == ("s", "c", 1.0, 2.0)
    assert repr(loaded.chat) == repr(chat), "the order of keys, and whether a number is whole"


def test_a_session_is_not_in_the_file_when_its_client_hears_that_it_is_deleted(kept: Kept) -> None:
    """Otherwise a coordinator that is killed at once brings it back."""
    kept.turn("s", "a", [1])
    asyncio.run(kept.file.delete(kept.store.get("s", "a")))
    with contextlib.closing(sqlite3.connect(kept.path)) as database:
        assert database.execute("select count(*) from sessions").fetchone() == (0,)


def test_times_go_on_over_a_restart(kept: Kept) -> None:
    kept.turn("s", "a", [1])
    kept.now += 60
    kept.restart()
    kept.now += 39
    assert kept.contents["a"]
    kept.now += 2
    assert not kept.contents["a"], "it was used 101 s ago"
    kept.restart()
    assert not kept.contents["a"]


def test_a_clock_that_was_set_back_does_not_keep_sessions_for_ever(kept: Kept) -> None:
    kept.turn("s", "a", [1])
    kept.now -= 10_000
    kept.restart()
    kept.now += IDLE_SECONDS + 1
    assert not kept.contents["a"]


def test_sessions_of_another_model_are_forgotten(kept: Kept) -> None:
    kept.turn("s", "a", [1])
    kept.model = "another"
    kept.restart()
    kept.model = "m"
    kept.restart()
    assert not kept.contents["a"]


def test_only_the_owner_can_read_the_files_and_forgotten_text_is_gone(kept: Kept) -> None:
    secret = "a very secret message"
    kept.turn("s", "a", [1], Chat(({"role": "user", "content": secret},)))
    kept.store.delete("s", "a")
    asyncio.run(kept.file.close())
    files = [path for path in kept.path.parent.iterdir() if not path.name.endswith(".lock")]
    assert files
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert secret.encode() not in path.read_bytes()
    kept.begin()


def test_a_file_belongs_to_one_coordinator(kept: Kept) -> None:
    with pytest.raises(StartupError, match="in use by another coordinator: name another one with --session-file"):
        SessionFile(kept.path)


@pytest.mark.parametrize("content", [b"no database at all" * 100, b"SQLite format 3\x00" + b"\x01" * 4000])
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "sessions"
    path.write_bytes(content)
    for _ in range(2):  # the refusal leaves no lock
        with pytest.raises(StartupError, match=r"cannot be used .*: name another one with --session-file"):
            SessionFile(path)
    assert path.read_bytes() == content


def test_a_directory_and_the_database_of_something_else_stay_as_they_are(tmp_path: Path) -> None:
    directory, other = tmp_path / "directory", tmp_path / "other"
    directory.mkdir(mode=0o755)
    with sqlite3.connect(other) as database:
        database.execute("create table sessions (id, model)")
        database.execute("insert into sessions values (1, 'mine')")
    database.close()
    mode = stat.S_IMODE(other.stat().st_mode)
    for path, why in ((directory, "it is not a file"), (other, "it is a database of something else")):
        with pytest.raises(StartupError, match=why):
            SessionFile(path)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o755
    assert stat.S_IMODE(other.stat().st_mode) == mode
    with sqlite3.connect(other) as database:
        assert database.execute("select * from sessions").fetchall() == [(1, "mine")]
    database.close()


def test_a_file_with_a_damaged_page_is_refused_with_its_name(kept: Kept) -> None:
    for i in range(50):
        kept.turn(f"s{i}", "a", [1])
    asyncio.run(kept.file.close())
    content = bytearray(kept.path.read_bytes())
    content[4096:12288] = b"\x55" * 8192
    kept.path.write_bytes(content)
    kept.file = SessionFile(kept.path)
    with pytest.raises(StartupError, match=r"cannot be used .*malformed"):
        kept.file.load("m")


def test_a_file_of_a_later_specd_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sessions"
    with sqlite3.connect(path) as database:
        database.execute("pragma user_version = 7")
    database.close()
    with pytest.raises(StartupError, match="it has format 7, and this specd reads 1"):
        SessionFile(path)


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]", b"5", None, 5, b'{"token_ids": "%%%"}'])
def test_a_damaged_session_is_forgotten_alone(kept: Kept, content: object) -> None:
    kept.turn("s", "a", [1], Chat(({"role": "user"},)))
    kept.turn("t", "a", [2])
    asyncio.run(kept.file.close())
    with sqlite3.connect(kept.path) as database:
        database.execute("update sessions set content = ? where session_id = 's'", (content,))
    database.close()
    kept.begin()
    assert [session_id for session_id, *_ in kept.contents["a"]] == ["t"]


async def test_a_disk_that_fails_costs_the_file_and_no_generation(tmp_path: Path) -> None:
    failures: list[None] = []
    file = SessionFile(tmp_path / "sessions", lambda: failures.append(None))
    file.load("m")
    session = KeptSession("s", "a", 1.0, 1.0, 0.0, num_turns=1)
    await file.save(session)
    file._thread.submit(lambda: file._database.execute("pragma query_only = on")).result()
    await file.save(replace(session, num_turns=2))
    assert len(failures) == 1
    file._thread.submit(lambda: file._database.execute("pragma query_only = off")).result()
    other = KeptSession("t", "a", 1.0, 1.0, 0.0, num_turns=1)
    await file.save(other)
    assert len(failures) == 1
    assert [each.session_id for each in file.load("m")] == ["t"], "the turn before the unsaved one must not come back"
    file._thread.submit(lambda: file._database.execute("pragma query_only = on")).result()
    file.forget(other)
    file._thread.submit(lambda: file._database.execute("pragma query_only = off")).result()
    await file.save(session)
    assert [each.session_id for each in file.load("m")] == ["s"], "the deleted one must not come back"
    await file.close()
