"""The sessions that run at a target, with any draft."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from coordinator.planner.window import WINDOW_ROUNDS


class RunningSession(Protocol):
    """A session that plans rounds. `planned_at` is the number of rounds of all sessions when it last did."""

    planned_at: int

    def is_paused(self) -> bool:
        """Return whether it waits for its client, or has yielded to others."""


Session = TypeVar("Session", bound=RunningSession)


class Running(Generic[Session]):
    """The sessions that share a target's steps, with the rounds that they have run."""

    def __init__(self) -> None:
        self.sessions: dict[Session, None] = {}
        self.num_rounds = self.num_changes = 0

    def add(self, session: Session) -> None:
        """Count a session."""
        self.sessions[session] = None
        self.num_changes += 1

    def remove(self, session: Session) -> None:
        """Count a session no longer."""
        self.sessions.pop(session, None)
        self.num_changes += 1

    def active(self) -> list[Session]:
        """Return the sessions that take part in rounds now: neither paused nor stalled."""
        oldest = self.num_rounds - 2 * WINDOW_ROUNDS * len(self.sessions)
        return [each for each in self.sessions if each.planned_at >= oldest and not each.is_paused()]
