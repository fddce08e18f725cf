"""What rounds of several sessions take with drafts and without, in comparison, by what they took."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from statistics import median

from coordinator.plan import JointPlan
from specd.moving_average import MovingAverage

_WEIGHT = 0.3  # of the latest stretch
_TRIAL_WEIGHT = 0.5  # of the latest trial, or the first
# The other way is tried again when what the last trial cost is less than this part of the time since. A trial costs a
# part of its stretch at least, if only because sessions get out of step.
_TRIAL_SHARE = 0.005
_LEAST_LOSS = 0.1
_LARGEST_SURPRISE = 2.0  # for a single trial
# At first in a stretch the sessions still are where the one before has left them: out of step, the draft behind.
_SKIPPED_ROUNDS = 3


class LoadTrials:
    """Compares what rounds of several sessions take, with drafts and without, to what they should.

    What a round costs can be foretold for one session, by its parts. Several wait for each other's steps, form groups,
    and have both workers compute at once, which takes each longer. So what they do not do is tried, for all sessions in
    turns of some rounds, by how many they are (the nearest power of two). Only what rounds take is compared, not what
    comes of them: how many tokens that is lies in the texts, which change from one turn to the next.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._known: dict[int, _Comparison] = {}
        self._stretch = _Stretch(0, is_due=False)

    @property
    def alone(self) -> float:
        """How many times as long as foretold rounds take without drafts, in comparison to those with them."""
        return self._comparison.alone

    @property
    def is_due(self) -> bool:
        """Whether in this stretch the sessions are to do what they usually do not."""
        return self._stretch.is_due

    @property
    def is_trial(self) -> bool:
        """Whether they do that."""
        return self._stretch.instead_of is not None

    def next_stretch(self, num_sessions: int) -> None:
        """Judge the stretch that ends, if there are about as many sessions as when it began, and begin the next."""
        stretch, comparison = self._stretch, self._comparison
        size = round(math.log2(max(num_sessions, 1)))
        says_something = size == stretch.size and bool(stretch.took)
        if stretch.expected is not None and stretch.instead_of is not None:
            # It has cost something also where it says nothing.
            loss = comparison.tried(stretch.expected, stretch.instead_of, stretch.surprise) if says_something else 0.0
            comparison.trial_at = self._clock() + stretch.seconds * max(loss, _LEAST_LOSS) / _TRIAL_SHARE
        elif stretch.expected is not None and says_something:
            comparison.usually(stretch.expected.drafts, stretch.surprise)
        comparison = self._known.setdefault(size, _Comparison())
        if size != stretch.size:
            comparison.usual = None  # machines get busy meanwhile
        self._stretch = _Stretch(size, is_due=comparison.usual is not None and self._clock() >= comparison.trial_at)

    def expect(self, expected: JointPlan, *, instead_of: JointPlan | None = None) -> None:
        """Say what the stretch that has begun should come to; if it is a trial, instead of what."""
        stretch = self._stretch
        if stretch.expected is not None and stretch.expected.drafts is not expected.drafts:
            stretch.num_rounds = 0
            stretch.took.clear()
        stretch.took = {session: took for session, took in stretch.took.items() if session in expected.tokens}
        stretch.expected, stretch.instead_of = expected, instead_of

    def observe(self, session: Hashable, seconds: float) -> None:
        """Count what a round of a session took."""
        stretch = self._stretch
        if stretch.expected is not None and session in stretch.expected.tokens:
            stretch.num_rounds += 1
            stretch.seconds += seconds / len(stretch.expected.tokens)
            if stretch.num_rounds > _SKIPPED_ROUNDS * len(stretch.expected.tokens):
                stretch.took.setdefault(session, []).append(seconds / stretch.expected.seconds)

    @property
    def _comparison(self) -> _Comparison:
        return self._known.setdefault(self._stretch.size, _Comparison())


@dataclass
class _Stretch:
    """Some rounds of about 2**size sessions, and how many times as long as expected those of each session took.

    Those that are skipped are not among them, but in the seconds that the stretch has taken.
    """

    size: int
    is_due: bool
    seconds: float = 0.0
    expected: JointPlan | None = None
    instead_of: JointPlan | None = None
    num_rounds: int = 0
    took: dict[Hashable, list[float]] = field(default_factory=dict)

    @property
    def surprise(self) -> float:
        """How many times as long as expected the rounds take, by the tokens per second that all of them should have.

        Of each session the median round counts: some wait for a piece of somebody's prompt. Those that fall out of step
        with the others take as much longer as these take less.
        """
        assert self.expected is not None
        tokens = {session: self.expected.tokens[session] for session in self.took}
        return sum(tokens.values()) / sum(tokens[session] / median(took) for session, took in self.took.items())


class _Comparison:
    """How surprised one is by rounds without drafts, in comparison to those with them.

    A trial is held against the stretches just before it: forecasts follow what is usual, machines get busy.
    """

    def __init__(self) -> None:
        self.usual: MovingAverage | None = None
        self.trial_at = 0.0
        self._drafts = False
        self._log_alone = MovingAverage(_TRIAL_WEIGHT, 0.0)

    @property
    def alone(self) -> float:
        return math.exp(self._log_alone.value)

    def usually(self, drafts: bool, surprise: float) -> None:
        """Take in a stretch that was no trial."""
        if self.usual is None or drafts is not self._drafts:
            self.usual = MovingAverage(_WEIGHT)
        self._drafts = drafts
        self.usual.add(surprise)

    def tried(self, expected: JointPlan, instead_of: JointPlan, surprise: float) -> float:
        """Take in a trial; returns what part of the tokens it has lost."""
        if self.usual is None or expected.drafts is self._drafts:
            return 0.0
        gap = min(max(surprise / self.usual.value, 1 / _LARGEST_SURPRISE), _LARGEST_SURPRISE)
        self._log_alone.add(math.log(1 / gap if expected.drafts else gap))
        return 1 - expected.rate / instead_of.rate / gap
