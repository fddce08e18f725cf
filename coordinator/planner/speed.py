"""How fast sessions are that run together."""

from __future__ import annotations

from specd.step_costs import MovingAverage, interpolate

_WEIGHT = 0.02  # of one round in an average


class Speed:
    """What a token takes, of each of so many sessions that run together: as rounds have shown.

    A number of sessions that was not seen yet is taken to be slower by as much as it is larger, or between those that
    were. So whoever lets sessions run while they are fast enough comes to see how fast more of them are.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, MovingAverage] = {}
        self._tokens: dict[int, MovingAverage] = {}
        self._seen: dict[int, float] = {}  # by number of sessions, in order: admission asks for many in each round

    def add(self, num_sessions: int, seconds: float, num_tokens: int) -> None:
        """Learn from a round of one of so many sessions."""
        for averages, value in ((self._seconds, seconds), (self._tokens, num_tokens)):
            averages.setdefault(num_sessions, MovingAverage(_WEIGHT)).add(value)
        is_new = num_sessions not in self._seen
        self._seen[num_sessions] = self._seconds[num_sessions].value / self._tokens[num_sessions].value
        if is_new:
            self._seen = dict(sorted(self._seen.items()))

    def seconds_per_token(self, num_sessions: int) -> float:
        """Return what a token of each takes; 0 before any round."""
        seen = self._seen
        if num_sessions in seen:
            return seen[num_sessions]
        if not seen:
            return 0.0
        fewest, *more = seen
        if num_sessions > (most := max(seen)):
            return seen[most] * num_sessions / most
        if num_sessions >= fewest:
            return interpolate(seen, num_sessions)
        slowest, fastest = seen[fewest], seen[fewest] * num_sessions / fewest
        if not more:
            return fastest
        slope = (seen[more[-1]] - seen[fewest]) / (more[-1] - fewest)
        return min(max(seen[fewest] - slope * (fewest - num_sessions), fastest), slowest)
