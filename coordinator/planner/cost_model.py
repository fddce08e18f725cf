"""The cost model: what the parts of a round take now, in seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.core import Round
from coordinator.planner.policy import RoundCosts
from specd.settings import MAX_NUM_DRAFT_TOKENS
from specd.step_costs import MovingAverage, StepCosts

_WEIGHT = 0.05  # of one round in an average
# A request with more of the session's tokens than this is a prefill, a replay, or a draft that catches up.
_MOST_NEW_TOKENS = 8
# Spread of x, as a part of its mean, with which points outweigh the prior of a line.
_LINE_PRIOR = 0.1


class Line:
    """A line through (x, y), by exponentially weighted least squares; of slope 1 as far as x has not varied."""

    def __init__(self, weight: float) -> None:
        self._x, self._y, self._xx, self._xy = (MovingAverage(weight) for _ in range(4))

    def add(self, x: float, y: float) -> None:
        """Take in a point."""
        for average, value in ((self._x, x), (self._y, y), (self._xx, x * x), (self._xy, x * y)):
            average.add(value)

    def at(self, x: float) -> float:
        """Return y at x; x itself before the first point."""
        x_mean, y_mean = self._x.value, self._y.value
        prior = (_LINE_PRIOR * x_mean) ** 2
        slope = (self._xy.value - x_mean * y_mean + prior) / (self._xx.value - x_mean**2 + prior) if prior else 1.0
        return y_mean + max(slope, 0.0) * (x - x_mean)


class CostModel:
    """Combines both workers' measured costs with the overheads that rounds show, and refreshes all of them."""

    def __init__(self, target: Callable[[], StepCosts | None], draft: Callable[[], StepCosts | None]) -> None:
        """Read the costs of a verify and of a proposal, None as long as they are not known."""
        self._target = target
        self._draft = draft
        self._proposals = Line(_WEIGHT)
        self._draft_overhead = MovingAverage(_WEIGHT)
        self._round_overhead = MovingAverage(_WEIGHT)
        self._draft_wait = MovingAverage(_WEIGHT)

    def costs(self, num_sessions: int) -> RoundCosts | None:
        """Return the costs of a round that so many sessions share; None before the target has come."""
        target, draft = self._target(), self._draft()
        if target is None:
            return None
        proposals = []
        if draft is not None:
            proposals = [0.0, *(draft.seconds(num_sessions, k) for k in range(1, MAX_NUM_DRAFT_TOKENS + 1))]
        widths: Sequence[int] = range(1, MAX_NUM_DRAFT_TOKENS + 2)
        if num_sessions == 1:
            proposals[1:] = map(self._proposals.at, proposals[1:])
            widths = [target.cheapest_width(1, width) for width in widths]  # the target pads
        verify = [target.seconds(num_sessions, width) for width in widths]
        overheads = (self._draft_overhead, self._round_overhead, self._draft_wait)
        return RoundCosts(proposals, verify, *(each.value for each in overheads))

    def observe(self, round_: Round, num_sessions: int) -> None:
        """Learn from a round, while so many sessions are active."""
        drafted = round_.proposal.drafted
        propose, verify = drafted.exchange, round_.verdict.exchange
        if max(propose.num_tokens, verify.num_tokens) > _MOST_NEW_TOKENS or round_.verdict.was_retried:
            return
        is_shared = num_sessions > 1
        # Of several sessions, each waits for the others' steps, and the longer the further these draft. As an overhead,
        # that would make each of them draft further.
        draft_queue, queue = (0.0, 0.0) if is_shared else (propose.queue_seconds, verify.queue_seconds)
        costs, draft = self._target(), self._draft()
        # A step for one of several sessions had only some of the cores.
        if costs is not None and is_shared == (verify.num_sessions > 1):
            n = verify.num_sessions
            costs.observe(n, verify.step_tokens / n, verify.compute_seconds, weight=1 / n)
        if drafted.fault:
            return  # the round waited for the draft
        if drafted.token_ids:
            if is_shared:  # at most for as long as they draft: longer, it is for somebody's prompt
                self._draft_wait.add(min(propose.queue_seconds + verify.queue_seconds, propose.compute_seconds))
            self._draft_overhead.add(propose.wire_seconds + draft_queue)
            n, k, seconds = propose.num_sessions, len(drafted.token_ids), propose.compute_seconds
            if draft is not None and is_shared:
                draft.observe(n, k, seconds, weight=1 / n)
            elif draft is not None:  # after a verify it begins with cold caches and cores, which is no cost of a token
                self._proposals.add(draft.seconds(n, k), seconds)
        self._round_overhead.add(verify.wire_seconds + queue + round_.stage_seconds["coordinator"])
