"""The sessions that are kept, so that a later Generate can continue them."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specd.errors import ConflictError, NotFoundError

if TYPE_CHECKING:
    from specd.text.chat import Chat

_MAX_SHOWN_ID = 64  # ours have 16 characters; a foreign one can be longer than a status has room for


@dataclass(eq=False)
class KeptSession:
    """A session between its turns, or as it was before the turn that runs now. Times are unix seconds.

    Only the store changes it. A turn replaces `token_ids` and never changes the array, which others may still read.
    """

    session_id: str
    created_at: float
    last_used_at: float
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    chat: Chat | None = None
    source: array[int] = field(default_factory=lambda: array("I"))
    num_turns: int = 0
    busy: bool = True

    @property
    def num_tokens(self) -> int:
        """Its tokens, those of its source included."""
        return len(self.token_ids) + len(self.source)


class SessionStore:
    """Keeps sessions until they are deleted, idle for too long, or together too large.

    A turn is atomic: `begin` or `acquire` starts it, then `finish` changes the session, or `abandon` leaves it as it
    was. In between it is busy: neither forgotten nor given to another.

    Invariant: the idle sessions have at most `budget_tokens` tokens; the least recently used ones go. With a budget or
    a time of 0 nothing is kept. Expired sessions go with the next call.
    """

    def __init__(self, idle_seconds: float, budget_tokens: int, clock: Callable[[], float]) -> None:
        """Read the time, in unix seconds, from `clock`."""
        self.num_tokens = 0  # of the idle sessions
        self._idle_seconds = idle_seconds
        self._budget_tokens = budget_tokens
        self._clock = clock
        self._sessions: OrderedDict[str, KeptSession] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        """Count the sessions, busy ones too."""
        return len(self._sessions)

    def begin(self, session_id: str) -> KeptSession:
        """Start the first turn of a new session."""
        self.expire()
        assert session_id not in self._sessions
        now = self._clock()
        session = self._sessions[session_id] = KeptSession(session_id, created_at=now, last_used_at=now)
        return session

    def acquire(self, session_id: str) -> KeptSession:
        """Start another turn of a session.

        Raises NotFoundError (SESSION_NOT_FOUND), or ConflictError (SESSION_BUSY) while another turn runs on it.
        """
        session = self._get_idle(session_id)
        session.busy = True
        self.num_tokens -= session.num_tokens
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
        session.num_turns += 1
        self._release(session)

    def abandon(self, session: KeptSession) -> None:
        """End a turn that did not finish: the session is as it was before, and a new one is forgotten.

        The turn counts as a use, or a long one would leave the session expired.
        """
        assert session.busy
        self._release(session)

    def list(self) -> tuple[KeptSession, ...]:
        """Return the sessions, the most recently used first."""
        self.expire()
        return tuple(reversed(self._sessions.values()))

    def get(self, session_id: str) -> KeptSession:
        """Return a session, which does not count as a use. Raises NotFoundError (SESSION_NOT_FOUND)."""
        self.expire()
        session = self._sessions.get(session_id)
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

    def delete(self, session_id: str) -> None:
        """Forget a session. Raises as `acquire` does."""
        self._forget(self._get_idle(session_id))

    def expire(self) -> None:
        """Forget the sessions that have been idle for too long."""
        now = self._clock()
        while (oldest := self._oldest_idle()) is not None and now >= oldest.last_used_at + self._idle_seconds:
            self._forget(oldest)

    def expires_at(self, session: KeptSession) -> float | None:
        """Return when a session is forgotten if it is not used, in unix seconds; None while it is busy."""
        return None if session.busy else session.last_used_at + self._idle_seconds

    def _get_idle(self, session_id: str) -> KeptSession:
        session = self.get(session_id)
        if session.busy:
            raise ConflictError(
                "SESSION_BUSY", f"a Generate runs on session {session_id}: wait until it has ended, or cancel it"
            )
        return session

    def _release(self, session: KeptSession) -> None:
        session.busy = False
        self.num_tokens += session.num_tokens
        self._use(session)
        # A session over the budget goes itself: no other has to go for it.
        if session.num_turns == 0 or not self._keeps or session.num_tokens > self._budget_tokens:
            self._forget(session)
        self.expire()
        while self.num_tokens > self._budget_tokens:
            oldest = self._oldest_idle()
            assert oldest is not None
            self._forget(oldest)

    def _use(self, session: KeptSession) -> None:
        session.last_used_at = self._clock()
        self._sessions.move_to_end(session.session_id)

    def _forget(self, session: KeptSession) -> None:
        assert not session.busy
        del self._sessions[session.session_id]
        self.num_tokens -= session.num_tokens

    def _oldest_idle(self) -> KeptSession | None:
        return next((session for session in self._sessions.values() if not session.busy), None)

    @property
    def _keeps(self) -> bool:
        return self._idle_seconds > 0 and self._budget_tokens > 0
