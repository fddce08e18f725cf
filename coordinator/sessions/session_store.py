"""The sessions that are kept, so that a later Generate can continue them."""

from __future__ import annotations

import math
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specd.errors import ConflictError, NotFoundError
from specd.model_info import AdapterInfo

if TYPE_CHECKING:
    from specd.text.chat import Chat

# Limits the memory of many sessions with few tokens.
_MOST_SESSIONS = 10_000
_CHARACTERS_PER_TOKEN = 4
_MAX_SHOWN_ID = 64  # our ids have 16 characters; a foreign one can be too long for a status


@dataclass(eq=False)
class KeptSession:
    """A session between its turns, or its state before the turn that runs now.

    Times are unix seconds, except for `idle_since`, which comes from a clock that does not jump. `size` is its part of
    the budget: its tokens, or more for a conversation with much text that the template left out. `use` orders a
    client's sessions by their last use, in microseconds. Only the store changes both. A turn replaces `token_ids` and
    never changes the array, which others may still read. The first turn decides the `adapter` that computes all turns.
    """

    session_id: str
    client: str
    created_at: float
    last_used_at: float
    idle_since: float  # its last use, too
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    chat: Chat | None = None
    source: array[int] = field(default_factory=lambda: array("I"))
    adapter: AdapterInfo | None = None
    num_turns: int = 0
    busy: bool = True
    size: int = 0
    use: int = 0

    @property
    def num_tokens(self) -> int:
        """The number of its tokens, with those of its source."""
        return len(self.token_ids) + len(self.source)


class _IdleCounts:
    """Counts the idle sessions and their tokens, in all and by client."""

    def __init__(self) -> None:
        self.num_tokens = 0  # as `size` counts them
        self.tokens: Counter[str] = Counter()
        self.sessions: Counter[str] = Counter()

    def add(self, session: KeptSession, sign: int = 1) -> None:
        """Count a session that becomes idle, or with a `sign` of -1 one that stops being idle."""
        self.num_tokens += sign * session.size
        for counts, number in ((self.tokens, session.size), (self.sessions, 1)):
            counts[session.client] += sign * number
            if not counts[session.client]:
                del counts[session.client]


class SessionStore:
    """Keeps sessions until they are deleted, idle for too long, or together too large.

    A session belongs to the client that began it. Other clients get the same error as for an unknown session, in the
    same way.

    A turn is atomic: `begin` or `acquire` starts it, then `finish` changes the session, or `abandon` leaves it as it
    was. In between it is busy: neither forgotten nor given to another.

    Invariant: the idle sessions have at most `budget_tokens` tokens, and there are at most `_MOST_SESSIONS` sessions.
    Beyond these limits, the client with most loses its least recently used idle session, so a client with no more than
    an equal share loses none. With a budget or a time of 0 no session is kept. The next call drops expired sessions.
    """

    def __init__(
        self,
        idle_seconds: float,
        budget_tokens: int,
        clock: Callable[[], float],
        steady_clock: Callable[[], float],
    ) -> None:
        """`clock` returns unix seconds; idle times come from a clock that does not jump.

        `on_forget`, which can be set, is called with each session that is forgotten.
        """
        self.on_forget: Callable[[KeptSession], None] = lambda session: None
        self.idle = _IdleCounts()
        self._keeps = idle_seconds > 0 and budget_tokens > 0
        self._idle_seconds = idle_seconds
        self._budget_tokens = budget_tokens
        self._clock = clock
        self._steady_clock = steady_clock
        # By owner and id, the least recently used first.
        self._sessions: OrderedDict[tuple[str, str], KeptSession] = OrderedDict()
        self._num_kept: Counter[str] = Counter()  # by client, with busy sessions
        self._last_uses: Counter[str] = Counter()  # by client, so that a client learns nothing about others

    def __len__(self) -> int:
        """Count the sessions, with busy ones."""
        return len(self._sessions)

    def restore(self, sessions: Iterable[KeptSession]) -> None:
        """Replace our sessions with these, which another coordinator has kept; the least recently used comes first."""
        for session in sessions:
            self.drop(session.session_id, session.client)
            idle_seconds = max(self._clock() - session.last_used_at, 0.0)
            last_used_at = session.last_used_at
            self._sessions[session.client, session.session_id] = session
            self._num_kept[session.client] += 1
            session.size = _size(session)
            self._release(session)
            session.last_used_at, session.idle_since = last_used_at, self._steady_clock() - idle_seconds
            session.use = _use_at(last_used_at)
        self.expire()

    def clear(self) -> None:
        """Forget all sessions, except those on which a turn runs."""
        for session in [*self._sessions.values()]:
            self.drop(session.session_id, session.client)

    def begin(self, session_id: str, client: str) -> KeptSession:
        """Start the first turn of a client's new session."""
        self.expire()
        assert (client, session_id) not in self._sessions
        now = self._clock()
        session = KeptSession(session_id, client, created_at=now, last_used_at=now, idle_since=self._steady_clock())
        self._sessions[client, session_id] = session
        self._num_kept[client] += 1
        self._use(session)
        return session

    def acquire(self, session_id: str, client: str) -> KeptSession:
        """Start another turn of a client's session.

        Raises NotFoundError (SESSION_NOT_FOUND), or ConflictError (SESSION_BUSY) while another turn runs on it.
        """
        session = self._get_idle(session_id, client)
        session.busy = True
        self.idle.add(session, -1)
        self._use(session)
        return session

    def finish(
        self, session: KeptSession, token_ids: Sequence[int], chat: Chat | None, source: Sequence[int] = ()
    ) -> None:
        """End a turn: the session now has all these tokens, and this conversation or source."""
        assert session.busy
        session.token_ids = array("I", token_ids)
        session.source = array("I", source)
        session.chat = chat
        session.size = _size(session)
        session.num_turns += 1
        self._release(session)

    def abandon(self, session: KeptSession) -> None:
        """End a turn that did not finish: the session stays as it was before, and a new one is forgotten.

        The turn counts as a use, because otherwise a session could expire during a long turn.
        """
        assert session.busy
        self._release(session)

    def peek(self, session_id: str, client: str) -> KeptSession | None:
        """Return a client's session, if it is kept."""
        return self._sessions.get((client, session_id))

    def drop(self, session_id: str, client: str) -> None:
        """Forget a session that is kept elsewhere, or no longer, unless a turn runs on it."""
        session = self.peek(session_id, client)
        if session is not None and not session.busy:
            self._forget(session)

    def has(self, session: KeptSession) -> bool:
        """Return whether a session is still kept."""
        return self._sessions.get((session.client, session.session_id)) is session

    def list(self, client: str, *, before: float = math.inf) -> tuple[KeptSession, ...]:
        """Return a client's sessions, the most recently used first, with a `use` smaller than `before`."""
        self.expire()
        own = [each for each in self._sessions.values() if each.client == client and each.use < before]
        return tuple(sorted(own, key=lambda each: -each.use))

    def get(self, session_id: str, client: str) -> KeptSession:
        """Return a client's session, which does not count as a use. Raises NotFoundError (SESSION_NOT_FOUND)."""
        self.expire()
        session = self._sessions.get((client, session_id))
        if session is not None:
            return session
        shown = f"{session_id[:_MAX_SHOWN_ID]}…" if len(session_id) > _MAX_SHOWN_ID else session_id
        why = "this coordinator keeps no sessions"
        if self._keeps:
            why = (
                f"sessions are forgotten after {self._idle_seconds:g} s without use, or sooner when all together "
                f"have more than {self._budget_tokens} tokens"
            )
        raise NotFoundError("SESSION_NOT_FOUND", f"there is no session {shown!r}: {why}")

    def delete(self, session_id: str, client: str) -> None:
        """Forget a client's session. Raises as `acquire` does."""
        self._forget(self._get_idle(session_id, client))

    def expire(self) -> None:
        """Forget the sessions that have been idle for too long."""
        now = self._steady_clock()
        while (oldest := next((each for each in self._sessions.values() if not each.busy), None)) is not None:
            if now < oldest.idle_since + self._idle_seconds:
                return
            self._forget(oldest)

    def expires_at(self, session: KeptSession) -> float | None:
        """Return the time, in unix seconds, at which an unused session is forgotten; None while it is busy."""
        if session.busy:
            return None
        return self._clock() + session.idle_since + self._idle_seconds - self._steady_clock()

    def _get_idle(self, session_id: str, client: str) -> KeptSession:
        session = self.get(session_id, client)
        if session.busy:
            raise busy_error(session_id)
        return session

    def _release(self, session: KeptSession) -> None:
        session.busy = False
        self.idle.add(session)
        self._use(session)
        # A session that alone exceeds the budget is dropped, instead of all others.
        if session.num_turns == 0 or not self._keeps or session.size > self._budget_tokens:
            self._forget(session)
        self.expire()
        while self.idle.num_tokens > self._budget_tokens:
            self._forget_one_of(self.idle.tokens)
        while len(self._sessions) > _MOST_SESSIONS and self.idle.sessions:
            self._forget_one_of(self.idle.sessions)

    def _use(self, session: KeptSession) -> None:
        session.last_used_at, session.idle_since = self._clock(), self._steady_clock()
        # The next page of a list can be asked for at another coordinator, so the numbers are those of the clock.
        session.use = max(self._last_uses[session.client] + 1, _use_at(session.last_used_at))
        self._last_uses[session.client] = session.use
        self._sessions.move_to_end((session.client, session.session_id))

    def _forget(self, session: KeptSession) -> None:
        assert not session.busy
        del self._sessions[session.client, session.session_id]
        self.idle.add(session, -1)
        self._num_kept[session.client] -= 1
        if not self._num_kept[session.client]:
            del self._num_kept[session.client], self._last_uses[session.client]
        self.on_forget(session)

    def _forget_one_of(self, counts: Counter[str]) -> None:
        """Forget the idle session that the client with the largest count has not used for longest."""
        client = max(counts, key=counts.__getitem__)
        self._forget(next(each for each in self._sessions.values() if not each.busy and each.client == client))


def busy_error(session_id: str) -> ConflictError:
    """Return the error for a session on which another turn runs."""
    return ConflictError(
        "SESSION_BUSY", f"a Generate runs on session {session_id}: wait until it has ended, or cancel it"
    )


def _size(session: KeptSession) -> int:
    characters = session.chat.num_characters if session.chat is not None else 0
    return max(session.num_tokens, characters // _CHARACTERS_PER_TOKEN)


def _use_at(unix_seconds: float) -> int:
    return round(unix_seconds * 1e6)
