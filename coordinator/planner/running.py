"""The sessions that run at a target, with any draft."""

from __future__ import annotations

from typing import Protocol

from coordinator.planner.acceptance import Proposals
from coordinator.planner.window import WINDOW_ROUNDS, Window


class RunningSession(Protocol):
    """A session that plans rounds. `planned_at` is the number of rounds of all sessions when it last did.

    The round that it has planned adds `num_claimed` matched tokens to a step. The one before ended at `ended_at`.
    """

    client: str
    is_prefilling: bool
    planned_at: int
    num_claimed: int
    ended_at: float

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
        self.num_rounds = self.num_begun = self.num_ended = 0
        self._ended_at = 0  # the number of rounds when the last session ended

    def add(self, session: RunningSession) -> None:
        """Count a session."""
        self.sessions[session] = None
        self.num_begun += 1

    def remove(self, session: RunningSession) -> None:
        """Count a session no longer."""
        self.sessions.pop(session, None)
        self.num_ended += 1
        self._ended_at = self.num_rounds

    def is_over(self, window: Window) -> bool:
        """Return whether a window is over: by its rounds, or because sessions have come or gone.

        The place of a session that ended is left free for two rounds of the others, because a waiting one takes it.
        """
        is_smaller = self.num_ended > window.num_ended and self.num_rounds >= self._ended_at + 2 * len(self.sessions)
        return self.num_rounds >= window.ends_at or self.num_begun > window.num_begun or is_smaller

    def are_those_of(self, window: Window) -> bool:
        """Return whether the sessions are those with which the window began."""
        return (self.num_begun, self.num_ended) == (window.num_begun, window.num_ended)

    def claimed_since(self, time: float) -> int:
        """Return the matched tokens that sessions have planned after a round that ended since then, in seconds."""
        return sum(each.num_claimed for each in self.sessions if each.ended_at > time)

    def active(self) -> list[RunningSession]:
        """Return the sessions that take part in rounds now: neither paused nor stalled."""
        oldest = self.num_rounds - 2 * WINDOW_ROUNDS * len(self.sessions)
        return [each for each in self.sessions if each.planned_at >= oldest and not each.is_paused()]
