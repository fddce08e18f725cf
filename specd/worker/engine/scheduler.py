"""Chooses the jobs of a worker's next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from specd.worker.engine.batch_window import BatchWindow

if TYPE_CHECKING:
    from specd.worker.engine.jobs import Encode, Feed

# The most sessions and tokens that a step takes. Beyond them it costs as much more as it does more, and whoever came
# late waits longer for whoever came first.
MAX_STEP_ROWS = 64
MAX_STEP_TOKENS = 256

# How long rounds go on between two chunks of prefills, in times of a chunk.
ROUNDS_TO_CHUNKS = 3.0


@dataclass(frozen=True)
class StepTime:
    """The size of a step, and the time that it took.

    `is_prefill` is also for parts of a source, with `reads_source`.
    `is_whole` says that the step evaluated all that it described, and nothing of the step before. `had_all_cores` says
    that it was for all active sessions.
    """

    num_sessions: int
    num_tokens: int
    is_prefill: bool
    seconds: float
    reads_source: bool = False
    is_whole: bool = True
    had_all_cores: bool = True


class Job(Protocol):
    """Something that has tokens to feed."""

    @property
    def feed(self) -> Feed | Encode:
        """The tokens."""

    @property
    def session(self) -> Hashable:
        """Whose job it is."""


JobT = TypeVar("JobT", bound=Job)


class Scheduler(Generic[JobT]):
    """The jobs that wait, in the order in which they came: those of rounds, and the prefills.

    A step is for all the rounds that wait, as many as fit, oldest first; or for one chunk of one prefill, the prefills
    taking turns. While there are both, rounds and chunks take turns by time, so that neither waits for the other for
    long. `now` is any clock's, in seconds.
    """

    def __init__(self, *, shares_cores: bool = False) -> None:
        """`shares_cores` says whether steps compute on several cores of a CPU."""
        self.window = BatchWindow(shares_cores=shares_cores)
        self._rounds: deque[JobT] = deque()
        self._prefills: deque[JobT] = deque()
        self._chunk_due_at = 0.0
        self._idle_since = 0.0

    def __iter__(self) -> Iterator[JobT]:
        """Iterate over the jobs that wait."""
        yield from self._rounds
        yield from self._prefills

    def __len__(self) -> int:
        """Count them."""
        return len(self._rounds) + len(self._prefills)

    def add(self, job: JobT, now: float) -> None:
        """Let a job wait for its turn."""
        if job.feed.wants_logits:
            if not self._rounds:
                self._idle_since = now
            self._rounds.append(job)
        else:
            self._prefills.append(job)

    def next_step(self, now: float) -> tuple[list[JobT], float | None]:
        """Take the jobs of the next step; if there is none yet, say when to ask again, or None for a new job."""
        if self._prefills and (not self._rounds or now >= self._chunk_due_at):
            return [self._prefills.popleft()], None
        if not self._rounds:
            return [], None
        if not self._prefills and not self._is_step_full():
            wait_until = self.window.ends_at(self._idle_since, now)
            if wait_until > now:
                return [], wait_until
        return _take(self._rounds), None

    def stepped(self, step: StepTime, now: float) -> None:
        """Learn how long a step took that has just ended."""
        self._idle_since = now  # jobs that came during the step have waited for nothing yet
        if step.is_prefill:
            self._chunk_due_at = now + ROUNDS_TO_CHUNKS * step.seconds
        else:
            self.window.stepped(step.num_tokens, step.seconds)

    def _is_step_full(self) -> bool:
        num_tokens = sum(job.feed.num_tokens for job in self._rounds)
        return len(self._rounds) >= MAX_STEP_ROWS or num_tokens >= MAX_STEP_TOKENS


def _take(waiting: deque[JobT]) -> list[JobT]:
    """Take as many of them as a step has room for, the oldest first."""
    batch: list[JobT] = []
    room = MAX_STEP_TOKENS
    while waiting and len(batch) < MAX_STEP_ROWS:
        feed = waiting[0].feed
        if batch and feed.num_tokens > room:
            break
        room -= feed.num_tokens
        batch.append(waiting.popleft())
    return batch
