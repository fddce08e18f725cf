"""The places of requests that wait or run, and the places of each client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from coordinator.sessions.capacity import Capacity
from specd.errors import SpecdError


@dataclass(frozen=True)
class Prompt:
    """The number of tokens with which a session begins at a target, and the most tokens that it may generate.

    `blocks` are digests of its beginnings, for an estimate of the cached part.
    """

    num_tokens: int = 0
    max_tokens: int = 0
    blocks: Sequence[bytes] = ()


def _anywhere(capacity: Capacity) -> bool:
    return True


@dataclass(eq=False)
class Place:
    """A request's place in the queue, and then among the running ones. Only its Admission and Capacities change it.

    `num_tokens` are the tokens of the session and of its source, and `num_bytes` their memory in a target's cache.
    A session `is_paused` while it waits for its client to read, or for its turn to continue. `num_rounds` counts the
    rounds since it began or continued.

    `capacity` is that of the session's target. A session that `has_begun` and has none moves to another target, which
    it `may_be_at`. Its target has to prefill the `prompt`; `num_prefilling` of its tokens are left.
    """

    client: ClientPlaces
    num_tokens: tuple[int, int] = (0, 0)
    num_bytes: int = 0
    prompt: Prompt = Prompt()
    num_prefilling: int = 0
    capacity: Capacity | None = None
    may_be_at: Callable[[Capacity], bool] = _anywhere
    has_begun: bool = False
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
    moving: deque[Place] = field(default_factory=deque)  # sessions that wait for their turn at another target
    queue: deque[Place] = field(default_factory=deque)  # requests that wait for their turn to begin

    @property
    def waiting(self) -> list[Place]:
        """The places of requests that have not begun."""
        return [place for place in self.present if not place.has_begun]

    def drop_cancelled(self) -> None:
        """Drop cancelled requests from the head of each queue."""
        for line in (self.paused, self.moving, self.queue):
            while line and (turn := line[0].turn) is not None and turn.cancelled():
                line.popleft()
