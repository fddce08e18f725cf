"""The sessions that run at a target, with any draft."""

from __future__ import annotations

from typing import Protocol

from coordinator.planner.acceptance import Proposals
from coordinator.planner.window import WINDOW_ROUNDS


class RunningSession(Protocol):
    """A session that plans rounds. `planned_at` is the number of rounds of all sessions when it last did."""

    client: str
    is_prefilling: bool
    planned_at: int

    def is_paused(self) -> bool:
        """Return whether it waits for its client, or has yielded to others."""

    def drafts_with(self, planner: object) -> bool:
        """Return whether it has this planner, and its rounds may have draft tokens."""

    def proposals(self, *, alone: bool) -> Proposals:
        """Return how far its proposals get, which end early if it runs alone."""


class Running:
    """The sessions that share a target's steps, with the rounds that they have run."""

    def __init__(self) -> None:
        self.sessions: dict[RunningSession, None] = {}
        self.num_rounds = self.num_changes = 0

    def add(self, session: RunningSession) -> None:
        """Count a session."""
        self.sessions[session] = None
        self.num_changes += 1

    def remove(self, session: RunningSession) -> None:
        """Count a session no longer."""
        self.sessions.pop(session, None)
        self.num_changes += 1

    def active(self) -> list[RunningSession]:
        """Return the sessions that take part in rounds now: neither paused nor stalled."""
        oldest = self.num_rounds - 2 * WINDOW_ROUNDS * len(self.sessions)
        return [each for each in self.sessions if each.planned_at >= oldest and not each.is_paused()]
