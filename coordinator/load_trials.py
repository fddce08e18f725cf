"""Whether drafting pays for several sessions at once, by what came of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from specd.moving_average import MovingAverage

_WEIGHT = 0.3  # of the latest stretch
_GAIN_WEIGHT = 0.5  # of the latest trial
# What is done goes on until the other has been better by this much: changing costs something too.
_LEAST_GAIN = 0.03
# What does not pay is tried again when what the last trial cost is less than this part of the time since. A trial
# costs a part of its stretch at least, if only because sessions get out of step.
_TRIAL_SHARE = 0.005
_LEAST_LOSS = 0.1
# At first in a stretch the sessions still are where the one before has left them: out of step, the draft behind.
_SKIPPED_ROUNDS = 3


class LoadTrials:
    """Compares the tokens per second of sessions that draft and of the same ones when they do not.

    What a round costs can be foretold for one session, by its parts. Several wait for each other's steps, form groups,
    and have both workers compute at once, which takes each longer. So the forecast says how far to draft, and whether
    to draft at all is tried, for all sessions in turns of some rounds, by how many they are (the nearest power of two).
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._known: dict[int, _Comparison] = {}
        self._stretch = _Stretch(0, clock(), drafts=True)

    @property
    def drafts(self) -> bool:
        """Whether sessions are to draft in this stretch."""
        return self._stretch.drafts

    def observe(self, num_sessions: int, num_tokens: int, seconds: float, *, drafted: bool) -> None:
        """Count a round of one of so many sessions, and what came of it."""
        stretch = self._stretch
        stretch.num_rounds += 1
        if stretch.num_rounds > _SKIPPED_ROUNDS * num_sessions:
            stretch.num_tokens += num_tokens
            stretch.seconds.append(seconds)
            stretch.drafted |= drafted

    def next_stretch(self, num_sessions: int) -> None:
        """Judge the stretch that ends, if there were as many sessions all the while, and decide about the next."""
        size = round(math.log2(max(num_sessions, 1)))
        comparison = self._known.setdefault(size, _Comparison())
        now, stretch = self._clock(), self._stretch
        if size == stretch.size and stretch.seconds:
            # By what they did: they may draft, and the forecast be that it does not pay.
            comparison.add(stretch.drafted, stretch.rate, now - stretch.begun_at, now)
        self._stretch = _Stretch(size, now, comparison.next_drafts(now))


@dataclass
class _Stretch:
    """Some rounds of about 2**size sessions, and what came of those after the skipped ones."""

    size: int
    begun_at: float
    drafts: bool
    num_rounds: int = 0
    num_tokens: int = 0
    seconds: list[float] = field(default_factory=list)
    drafted: bool = False

    @property
    def rate(self) -> float:
        """Tokens per second of a session; by the median round, because some wait for a piece of somebody's prompt."""
        return self.num_tokens / len(self.seconds) / median(self.seconds)


class _Comparison:
    """What a round's tokens per second gain by the other way, and when that is to be tried again.

    A trial is held against the stretches just before it: machines get busy, and texts more difficult.
    """

    def __init__(self) -> None:
        self._pays = True
        self._usual: MovingAverage | None = None
        self._gain = MovingAverage(_GAIN_WEIGHT)
        self._trial_at = 0.0

    def add(self, drafted: bool, rate: float, seconds: float, now: float) -> None:
        """Take in what a stretch of so many seconds came to, which ends now."""
        if drafted is self._pays:
            self._usual = self._usual or MovingAverage(_WEIGHT)
            self._usual.add(rate)
        elif self._usual is not None:
            gain = rate / self._usual.value
            self._gain.add(gain)
            self._trial_at = now + seconds * max(1 - gain, _LEAST_LOSS) / _TRIAL_SHARE
            if self._gain.value > 1 + _LEAST_GAIN:
                self._pays = drafted
                self._usual = MovingAverage(_WEIGHT, rate)
                self._gain = MovingAverage(_GAIN_WEIGHT, 1 / self._gain.value)

    def next_drafts(self, now: float) -> bool:
        """Return whether to draft next, as far as the forecast is for it."""
        return self._pays if self._usual is None or now < self._trial_at else not self._pays
