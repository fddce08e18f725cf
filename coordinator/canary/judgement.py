"""The judgement of a draft on trial: it compares rounds with it and rounds with the present draft."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import NormalDist

from coordinator.canary.evidence import Evidence
from specd.setting_types import MAX_NUM_DRAFT_TOKENS
from specd.step_costs import StepCosts

MOST_ROUNDS = 200  # of the canary, after which it is decided
# The rounds of one session are one text. Acceptance differs more between texts than between drafts, so that the canary
# needs several: with 16 of them, Student's quantile is within a tenth of the normal one.
ROUNDS_OF_A_SESSION = MOST_ROUNDS // 16
# A decision at each of several times could be wrong, so that they share the probability of an error.
_LOOKS = (MOST_ROUNDS // 4, MOST_ROUNDS // 2, MOST_ROUNDS)
_ERROR = 0.05  # the most probability that an equal canary is kept, or is taken back before the last look
_LEAST_FREEDOM = 3.0  # degrees of freedom, below which the expansion of Student's t is not one
_MOST_SESSIONS = 256  # of the present draft, by kind; the canary's few sessions limit the certainty


class CanaryState(Enum):
    """The outcome of a trial."""

    UNDECIDED = "undecided"
    KEPT = "kept"
    TAKEN_BACK = "taken back"


@dataclass(frozen=True)
class Comparison:
    """The speeds of both drafts in tokens per second, with the standard error of the logarithm of their ratio."""

    present: float
    canary: float
    error: float
    freedom: float

    def verdict(self, error: float) -> CanaryState:
        """Return what is certain but for this probability of an error in each direction."""
        if self.freedom < _LEAST_FREEDOM:
            return CanaryState.UNDECIDED
        gain, bound = math.log(self.canary / self.present), student_quantile(1 - error, self.freedom) * self.error
        if abs(gain) <= bound:
            return CanaryState.UNDECIDED
        return CanaryState.KEPT if gain > 0 else CanaryState.TAKEN_BACK


@dataclass(frozen=True)
class _Speed:
    """The speed of a draft for one kind of work; its logarithm has this variance, by some number of sessions."""

    tokens_per_second: float
    variance: float
    num_sessions: int


@dataclass
class _Steps:
    """Steps of the target: their seconds, as measured and as calibrated, and the sessions in them."""

    num: int = 0
    num_sessions: int = 0
    seconds: float = 0.0
    expected_seconds: float = 0.0


@dataclass
class Judgement:
    """Compares two drafts by expected tokens per second, each at its best number of draft tokens.

    Acceptance depends on the kind of work, such as the temperature, so only sessions of one kind are compared, and the
    kinds are weighted by the canary's sessions. Costs are those that the workers calibrated, times what rounds took
    more. Both drafts are compared at the same number of sessions: the one that serves most of them has larger batches.
    """

    num_rounds: int = 0  # of the canary
    _looks: list[int] = field(default_factory=lambda: list(_LOOKS))
    _evidence: dict[Hashable, tuple[deque[Evidence], deque[Evidence]]] = field(default_factory=dict)
    _steps: _Steps = field(default_factory=_Steps)

    def begin(self, kind: Hashable, *, is_canary: bool) -> Evidence:
        """Return the evidence of a session's rounds of one kind, to add them to."""
        new = deque[Evidence](maxlen=_MOST_SESSIONS), deque[Evidence]()
        evidence = Evidence()
        self._evidence.setdefault(kind, new)[is_canary].append(evidence)
        return evidence

    def add_step(self, num_sessions: int, seconds: float, expected_seconds: float) -> None:
        """Count a step of the target for a number of sessions: how long it took, and as calibrated."""
        steps = self._steps
        steps.num += 1
        steps.num_sessions += num_sessions
        steps.seconds += seconds
        steps.expected_seconds += expected_seconds

    def add_rounds(self, number: int) -> bool:
        """Count rounds of the canary; return whether it is time to look at the evidence."""
        self.num_rounds += number
        is_time = bool(self._looks) and self.num_rounds >= self._looks[0]
        while self._looks and self.num_rounds >= self._looks[0]:
            self._looks.pop(0)
        return is_time

    def decide(self, comparison: Comparison | None) -> CanaryState:
        """Return the decision at a look. A canary that is not certainly faster at the last one is taken back."""
        state = CanaryState.UNDECIDED if comparison is None else comparison.verdict(_ERROR / len(_LOOKS))
        is_last = not self._looks
        return CanaryState.TAKEN_BACK if is_last and state is CanaryState.UNDECIDED else state

    def compare(
        self, target: StepCosts | None, present: StepCosts | None, canary: StepCosts | None
    ) -> Comparison | None:
        """Return the comparison by the calibrated costs of the workers; None if they or the evidence are missing."""
        if target is None or present is None or canary is None:
            return None
        steps, ks = self._steps, range(MAX_NUM_DRAFT_TOKENS + 1)
        num_sessions = steps.num_sessions / steps.num if steps.num else 1.0
        excess = steps.seconds / steps.expected_seconds if steps.expected_seconds > 0 else 1.0
        verify = [excess * target.seconds(num_sessions, 1 + k) for k in ks]
        proposals = [[costs.seconds(num_sessions, k) if k else 0.0 for k in ks] for costs in (present, canary)]
        pairs = [
            (_speed(before, verify, proposals[0]), _speed(new, verify, proposals[1]))
            for before, new in self._evidence.values()
            if len(before) > 1 and len(new) > 1
        ]
        if not pairs:
            return None
        weights = [new.num_sessions / sum(new.num_sessions for _, new in pairs) for _, new in pairs]
        of_present, of_canary = (
            math.exp(sum(w * math.log(pair[i].tokens_per_second) for w, pair in zip(weights, pairs, strict=True)))
            for i in range(2)
        )
        parts = [
            (w * w * own.variance, own.num_sessions - 1) for w, pair in zip(weights, pairs, strict=True) for own in pair
        ]
        variance = sum(part for part, _ in parts)
        # Welch and Satterthwaite: the degrees of freedom of a sum of variances.
        freedom = variance**2 / sum(part**2 / own for part, own in parts) if variance else sum(own for _, own in parts)
        return Comparison(of_present, of_canary, math.sqrt(variance), freedom)


def _speed(sessions: Sequence[Evidence], verify: Sequence[float], propose: Sequence[float]) -> _Speed:
    """Return the speed of all sessions together, with the variance of its logarithm between sessions (jackknife)."""
    total, n = sum(sessions, Evidence()), len(sessions)
    without = [math.log((total - each).tokens_per_second(verify, propose)) for each in sessions]
    mean = sum(without) / n
    variance = (n - 1) / n * sum((each - mean) ** 2 for each in without)
    return _Speed(total.tokens_per_second(verify, propose), variance, n)


def student_quantile(probability: float, freedom: float) -> float:
    """Return a quantile of Student's t (Abramowitz and Stegun, 26.7.5), within 2 % from three degrees of freedom."""
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom ** (i + 1) for i, term in enumerate(terms))
