"""The choice of the jobs for a worker's next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from specd.worker.engine.batch_window import BatchWindow

if TYPE_CHECKING:
    from specd.worker.engine.jobs import Encode, Feed

# The most sessions and tokens of a step. Beyond them the cost grows in proportion, and a larger step would only make
# the oldest job wait for later ones.
MAX_STEP_ROWS = 64
MAX_STEP_TOKENS = 256

# The time for rounds between two chunks of prefills, as a multiple of the last chunk's time.
ROUNDS_TO_CHUNKS = 3.0


@dataclass(frozen=True)
class StepTime:
    """The size of a step, and the time that it took.

    `is_prefill` is also true for parts of a source, with `reads_source`. `is_whole` is whether the step evaluated all
    that it described, and nothing from the step before. `had_all_cores` is whether it was for all active sessions.
    `network` computed it; None for a part of a source.
    """

    num_sessions: int
    num_tokens: int
    is_prefill: bool
    seconds: float
    reads_source: bool = False
    is_whole: bool = True
    had_all_cores: bool = True
    network: object = None


class Job(Protocol):
    """Something that has tokens to feed."""

    @property
    def feed(self) -> Feed | Encode:
        """The tokens."""

    @property
    def session(self) -> Hashable:
        """The session of the job."""


JobT = TypeVar("JobT", bound=Job)


class Scheduler(Generic[JobT]):
    """The waiting jobs of rounds, and the waiting prefills, each in the order of their arrival.

    A step is for all waiting rounds that fit, oldest first, or for one chunk of one prefill; prefills take turns. While
    both wait, a chunk runs after rounds have had `ROUNDS_TO_CHUNKS` times the time of the last chunk, so that neither
    waits long for the other. `now` comes from any clock, in seconds.
    """

    def __init__(self, *, shares_cores: bool = False) -> None:
        """`shares_cores` is whether steps compute on several cores of a CPU."""
        self.window = BatchWindow(shares_cores=shares_cores)
        self._rounds: deque[JobT] = deque()
        self._prefills: deque[JobT] = deque()
        self._chunk_due_at = 0.0
        self._idle_since = 0.0

    def __iter__(self) -> Iterator[JobT]:
        """Iterate over the waiting jobs."""
        yield from self._rounds
        yield from self._prefills

    def __len__(self) -> int:
        """Count them."""
        return len(self._rounds) + len(self._prefills)

    def add(self, job: JobT, now: float) -> None:
        """Add a waiting job."""
        if job.feed.wants_logits:
            if not self._rounds:
                self._idle_since = now
            self._rounds.append(job)
        else:
            self._prefills.append(job)

    def next_step(self, now: float) -> tuple[list[JobT], float | None]:
        """Remove and return the jobs of the next step; if none can run yet, return when to ask again.

        None as that time means: after the next new job.
        """
        if self._prefills and (not self._rounds or now >= self._chunk_due_at):
            return [self._prefills.popleft()], None
        if not self._rounds:
            return [], None
        if not self._prefills and not self._is_step_full():
            network = _network_of(self._rounds[0].session)
            wait_until = self.window.ends_at(self._idle_since, now, lambda other: _network_of(other) is network)
            if wait_until > now:
                return [], wait_until
        return _take(self._rounds), None

    def stepped(self, step: StepTime, now: float) -> None:
        """Learn the time of the step that has just ended."""
        self._idle_since = now  # jobs that came during the step begin to wait now
        if step.is_prefill:
            self._chunk_due_at = now + ROUNDS_TO_CHUNKS * step.seconds
        else:
            self.window.stepped(step.num_tokens, step.seconds)

    def _is_step_full(self) -> bool:
        num_tokens = sum(job.feed.num_tokens for job in self._rounds)
        return len(self._rounds) >= MAX_STEP_ROWS or num_tokens >= MAX_STEP_TOKENS


def _network_of(session: Hashable) -> object:
    """Return the network that computes a session; None of one without a cache."""
    return getattr(session, "network", None)


def _take(waiting: deque[JobT]) -> list[JobT]:
    """Remove and return the oldest jobs that the oldest one's network computes, as many as fit into a step."""
    batch: list[JobT] = []
    others: list[JobT] = []
    network, room = waiting[0].feed.network, MAX_STEP_TOKENS
    while waiting and len(batch) < MAX_STEP_ROWS:
        feed = waiting[0].feed
        if feed.network is not network:
            others.append(waiting.popleft())
            continue
        if batch and feed.num_tokens > room:
            break
        room -= feed.num_tokens
        batch.append(waiting.popleft())
    waiting.extendleft(reversed(others))
    return batch
