"""The worth of a draft for a target: tokens per second, from measured acceptance and measured times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from specd.step_costs import StepCosts

# The numbers of draft tokens in a round that are compared.
MOST_DRAFT_TOKENS = 8
# The speed, relative to the target alone, from which a draft is worth its memory.
LEAST_GAIN = 1.05


@dataclass(frozen=True)
class TrialRounds:
    """Rounds with the same number of draft tokens along texts of the target, their accepted and rejected tokens.

    A round rejects one token at most, because those behind it are not tried.
    """

    rounds: int = 0
    accepted: int = 0
    rejected: int = 0

    def __add__(self, other: TrialRounds) -> TrialRounds:
        return TrialRounds(self.rounds + other.rounds, self.accepted + other.accepted, self.rejected + other.rejected)

    @property
    def emitted(self) -> int:
        """The tokens of the text that these rounds emit: each adds one of the target's own."""
        return self.rounds + self.accepted

    @property
    def acceptance(self) -> float:
        """The share of the tried tokens that were accepted. Tokens behind a rejected one are not tried."""
        tried = self.accepted + self.rejected
        return self.accepted / tried if tried else 0.0


def rounds_along(agreements: Sequence[bool], k: int) -> TrialRounds:
    """Return the greedy rounds with k draft tokens along a text, of which `agreements` has one entry for each token.

    An entry is whether the draft, after the text before this token, chooses the target's token. A round accepts tokens
    up to the first that differs. The draft has then proposed each accepted token after the target's own text, so these
    are exactly the rounds of speculative decoding. A last round that the end of the text cuts short does not count.
    """
    at, total = 0, TrialRounds()
    while at + k < len(agreements):
        accepted = next((i for i in range(k) if not agreements[at + i]), k)
        total += TrialRounds(1, accepted, accepted < k)
        at += accepted + 1
    return total


@dataclass(frozen=True)
class TargetTrial:
    """Measurements of a target alone: seconds of a verify by its width, and the device."""

    seconds: Mapping[int, float]
    device: str = ""

    @property
    def tokens_per_second(self) -> float:
        """The speed without a draft: one token for each pass."""
        return 1 / self.seconds[1]

    @classmethod
    def restored(cls, record: Mapping[str, Any]) -> Self:
        """Return the trial of a record. Raises ValueError, TypeError or LookupError for other contents."""
        return cls(_times(record["seconds"], needs=1), str(record["device"]))


@dataclass(frozen=True)
class DraftTrial:
    """Measurements of a draft along the target's own texts, or the `failure` that left it without them.

    `rounds` and `seconds`, the time of a proposal, are by the number of draft tokens.
    """

    rounds: Mapping[int, TrialRounds] = field(default_factory=dict)
    seconds: Mapping[int, float] = field(default_factory=dict)
    failure: str = ""

    def as_record(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)

    @classmethod
    def restored(cls, record: Mapping[str, Any]) -> Self:
        """Return the trial of a record. Raises ValueError, TypeError or LookupError for other contents."""
        rounds = {int(k): TrialRounds(**own) for k, own in record["rounds"].items()}
        if not all(0 <= own.rejected <= own.rounds and own.accepted >= 0 for own in rounds.values()):
            raise ValueError(f"rounds {rounds}")
        failure = str(record["failure"])
        return cls(rounds, _times(record["seconds"], needs=None if failure else 1), failure)


@dataclass(frozen=True)
class Worth:
    """The speed of a pair at its best number of draft tokens, k; `speedup` is relative to the target alone."""

    k: int
    tokens_per_second: float
    acceptance: float
    speedup: float


def worth_of(target: TargetTrial, draft: DraftTrial) -> Worth | None:
    """Return the worth of a draft at its best k; None if its trial failed or had no round.

    A round takes a proposal and a verify, one after the other. Messages between processes are not in it.
    """
    if draft.failure or not draft.seconds:
        return None
    verify, propose = (StepCosts({1: each}) for each in (target.seconds, draft.seconds))

    def speed(k: int) -> float:
        own = draft.rounds[k]
        return own.emitted / (own.rounds * (propose.seconds(1, k) + verify.seconds(1, k + 1)))

    tried = [k for k, own in draft.rounds.items() if own.rounds]
    if not tried:
        return None
    best = max(tried, key=speed)
    return Worth(best, speed(best), draft.rounds[best].acceptance, speed(best) / target.tokens_per_second)


def sums_of(rounds: Iterable[Mapping[int, TrialRounds]]) -> dict[int, TrialRounds]:
    """Return the sums, by number of draft tokens, of the rounds of several texts."""
    total: dict[int, TrialRounds] = {}
    for own in rounds:
        for k, each in own.items():
            total[k] = total.get(k, TrialRounds()) + each
    return total


def _times(record: Mapping[Any, Any], *, needs: int | None) -> dict[int, float]:
    """Return seconds by size. Raises ValueError for values that cannot be, or without the size `needs`."""
    times = {int(size): float(seconds) for size, seconds in record.items()}
    if not all(0 < seconds < math.inf for seconds in times.values()) or (needs is not None and needs not in times):
        raise ValueError(f"times {times}")
    return times
