"""The time that a step waits for sessions that will soon have tokens for it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from weakref import WeakKeyDictionary

from specd.step_costs import MovingAverage

# The weight of each new value in an average, and the weight that earlier steps lose with each new step.
_DECAY = 0.1

# Wait for sessions that stay away for less than this part of the fixed cost of a step. Waiting for sessions that stay
# away for about the fixed cost gains little, and loses something when times vary.
_WORTH_WAITING = 0.75
# The same where a step computes on several cores. A step for all sessions has the cores to itself, and a step for some
# shares them with the draft, which computes for the others at that time.
_WORTH_WAITING_FOR_CORES = 1.5

# A session without work in this many steps is not active: a draft may take eight or more for a round of another.
_ACTIVE_STEPS = 32


class BatchWindow:
    """Decides how long a step waits for stragglers.

    Two steps instead of one cost the fixed part of a step twice. That is `fixed_seconds`, the intercept of step time
    over tokens, fitted to the steps themselves; until these differ enough for a fit, the value is from `expect`.
    So a step may idle for up to `fixed_seconds`, for sessions that have lately been away for clearly less than that
    between two requests. Where sessions stay away for longer, because another model computes for them, no step waits,
    and two groups of sessions take turns. On several cores, the turns of two groups also take the cores from each
    other: there a step may idle for half as long again, for sessions that are away for less than that (two to eight
    sessions measured 1.1 to 1.3 times as fast).

    All times are in seconds; `now` may come from any clock.
    """

    def __init__(self, *, shares_cores: bool = False) -> None:
        """`shares_cores` is whether steps compute on several cores of a CPU."""
        self._worth_waiting = _WORTH_WAITING_FOR_CORES if shares_cores else _WORTH_WAITING
        self._away_seconds = MovingAverage(_DECAY)
        self._answered_at: WeakKeyDictionary[Hashable, float] = WeakKeyDictionary()
        self._num_steps = 0
        self._last_step: WeakKeyDictionary[Hashable, int] = WeakKeyDictionary()
        self.expect(0.0)

    @property
    def fixed_seconds(self) -> float:
        """The fixed cost of a step, without its tokens."""
        return self._fixed_seconds

    @property
    def num_active(self) -> int:
        """The number of sessions with work in the last few steps; an open session without any is not active."""
        since = self._num_steps - _ACTIVE_STEPS
        return sum(last > since for last in tuple(self._last_step.values()))

    def expect(self, fixed_seconds: float) -> None:
        """Use this fixed cost of a step until later steps have shown it. Earlier ones were of the warm-up."""
        self._fixed_seconds = fixed_seconds
        # Decaying sums over steps, for a least-squares line through their times.
        self._weight = self._tokens = self._seconds = self._tokens_squared = self._tokens_seconds = 0.0

    def arrived(self, session: Hashable, now: float) -> None:
        """Learn that a session has something to compute."""
        self._last_step[session] = self._num_steps
        answered_at = self._answered_at.pop(session, None)
        if answered_at is not None and not self._is_given_up(answered_at, now):
            self._away_seconds.add(now - answered_at)

    def answered(self, session: Hashable, now: float) -> None:
        """Learn that a session has got its answer, and may send its next request."""
        self._answered_at[session] = now

    def step_begins(self, sessions: Iterable[Hashable]) -> None:
        """Learn which sessions the next step is for."""
        self._num_steps += 1
        for session in sessions:
            self._last_step[session] = self._num_steps

    def stepped(self, num_tokens: int, seconds: float) -> None:
        """Learn how long a step took."""
        keep = 1 - _DECAY
        self._weight = keep * self._weight + 1
        self._tokens = keep * self._tokens + num_tokens
        self._seconds = keep * self._seconds + seconds
        self._tokens_squared = keep * self._tokens_squared + num_tokens**2
        self._tokens_seconds = keep * self._tokens_seconds + num_tokens * seconds
        mean_tokens, mean_seconds = self._tokens / self._weight, self._seconds / self._weight
        variance = self._tokens_squared / self._weight - mean_tokens**2
        if variance > (0.1 * mean_tokens) ** 2:  # otherwise the steps are too similar for a fit
            slope = max((self._tokens_seconds / self._weight - mean_tokens * mean_seconds) / variance, 0.0)
            self._fixed_seconds = max(mean_seconds - slope * mean_tokens, 0.0)

    def ends_at(
        self, idle_since: float, now: float, can_join: Callable[[Hashable], bool] = lambda session: True
    ) -> float:
        """Return the time until which to wait for others; a time in the past if there is no session to wait for.

        `can_join` is whether a session can share the step: one with another adapter cannot.
        """
        is_worth_it = self._away_seconds.value <= self._worth_waiting * self._fixed_seconds
        end = idle_since
        for session, answered_at in tuple(self._answered_at.items()):
            if self._is_given_up(answered_at, now):
                del self._answered_at[session]
            elif is_worth_it and can_join(session):
                end = max(end, answered_at + 2 * self._away_seconds.value)
        return min(end, idle_since + max(self._worth_waiting, 1.0) * self._fixed_seconds)

    def _is_given_up(self, answered_at: float, now: float) -> bool:
        """Return whether a session has ended, or its client is slow.

        A session stays known for longer than steps wait for it, so that the window learns how late sessions return.
        """
        return now - answered_at > 2 * max(self._away_seconds.value, self._fixed_seconds)
