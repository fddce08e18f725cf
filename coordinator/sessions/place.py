"""The places of requests that wait or run, and the places of each client."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from specd.errors import SpecdError


@dataclass(eq=False)
class Place:
    """A request's place in the queue, and then among the running ones. Only its Admission changes it.

    `num_tokens` are the tokens of the session and of its source, `num_bytes` their memory in the target's cache. A
    session `is_paused` while it waits for its client to read, or for its turn to continue. `num_rounds` counts the
    rounds since it began or continued.
    """

    client: ClientPlaces
    num_tokens: tuple[int, int] = (0, 0)
    num_bytes: int = 0
    is_running: bool = False
    is_paused: bool = False
    num_rounds: int = 0
    turn: asyncio.Future[None] | None = None
    refusal: SpecdError | None = None


@dataclass(eq=False)
class ClientPlaces:
    """The places of one client. `turn` increases with each of its requests that begins to run."""

    turn: int
    num_running: int = 0
    reserved_bytes: int = 0
    present: dict[Place, None] = field(default_factory=dict)  # as they came
    paused: deque[Place] = field(default_factory=deque)  # sessions that wait for their turn to continue
    queue: deque[Place] = field(default_factory=deque)  # requests that wait for their turn to begin

    @property
    def waiting(self) -> list[Place]:
        """The places of requests that do not run yet."""
        return [place for place in self.present if not place.is_running and not place.is_paused]

    def drop_cancelled(self) -> None:
        """Drop cancelled requests from the head of each queue."""
        for line in (self.paused, self.queue):
            while line and (turn := line[0].turn) is not None and turn.cancelled():
                line.popleft()
