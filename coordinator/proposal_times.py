"""How long the draft takes for a proposal, by how many tokens it has."""

from __future__ import annotations

from specd.moving_average import MovingAverage
from specd.settings import MAX_NUM_DRAFT_TOKENS
from specd.step_costs import StepCosts

_WEIGHT = 0.1  # of the latest proposal
# By how many tokens, squared, proposals must differ for what they took to say as much as that all tokens are alike.
_GUESS_WEIGHT = 2.0
# So many tokens have taken what the calibration says, before any have.
_FIRST_NUM_TOKENS = 4.0
# A single proposal can take any time.
_LARGEST_SURPRISE = 4.0


class ProposalTimes:
    """A line: what a proposal takes at all, and what each of its tokens adds to that.

    The calibration measures one step at a time. In a proposal one step is described while the device still computes the
    one before, so that a token adds less than a step takes. The line follows what proposals took, in units of what the
    calibration makes of a token; as far as these are all alike, each of their tokens has the same part in it.
    """

    def __init__(self) -> None:
        self._num_tokens = MovingAverage(_WEIGHT, _FIRST_NUM_TOKENS)
        self._took = MovingAverage(_WEIGHT, _FIRST_NUM_TOKENS)
        self._variance = MovingAverage(_WEIGHT, 0.0)
        self._covariance = MovingAverage(_WEIGHT, 0.0)

    def seconds(self, costs: StepCosts, sessions: float) -> list[float]:
        """Return the seconds of proposals of 0, 1, 2, ... tokens for each of so many sessions."""
        step, more = _step(costs, sessions)
        return [0.0, *(more + step * self._units(k) for k in range(1, MAX_NUM_DRAFT_TOKENS + 1))]

    def observe(self, costs: StepCosts, sessions: float, num_tokens: int, seconds: float) -> None:
        """Learn what a proposal took."""
        step, more = _step(costs, sessions)
        expected = self._units(num_tokens)
        took = (seconds - more) / step
        took = min(max(took, expected / _LARGEST_SURPRISE), expected * _LARGEST_SURPRISE)
        # West, 1979: from the averages of before and of after.
        before = num_tokens - self._num_tokens.value, took - self._took.value
        self._num_tokens.add(num_tokens)
        self._took.add(took)
        self._variance.add(before[0] * (num_tokens - self._num_tokens.value))
        self._covariance.add(before[0] * (took - self._took.value))

    def _units(self, num_tokens: int) -> float:
        level = self._took.value / self._num_tokens.value
        slope = (self._covariance.value + _GUESS_WEIGHT * level) / (self._variance.value + _GUESS_WEIGHT)
        line = self._took.value + max(slope, 0.0) * (num_tokens - self._num_tokens.value)
        return max(line, level / 2)  # the first takes something, however steep it seems


def _step(costs: StepCosts, sessions: float) -> tuple[float, float]:
    """Return the seconds of a step, and by how much the first takes longer: it takes in the target's token too."""
    step = costs.seconds(sessions, 1)
    return step, costs.seconds(sessions, 2) - step
