"""How far to speculate in a round: k by expected tokens per second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

# A token that is less likely to count than this is worth nothing anywhere.
_LEAST_ACCEPTANCE = 0.03
# Where so few proposals get that end early by themselves, it hardly matters whether they may go on. But tokens that a
# proposal may have are not left for going ahead.
_LEAST_REACHED = 0.05


@dataclass(frozen=True)
class Plan:
    """How far the draft is to go in a round.

    It proposes up to `num_draft_tokens`, and ends with the i-th or the one after it if the product of the first i
    confidences is less than the i-th of `min_confidences`; without any it does not look at them. While the target
    verifies, it goes on by up to `num_ahead_tokens` beyond its guess of the target's next token, if proposal and guess
    are together no less confident than `min_ahead_confidence`.
    """

    num_draft_tokens: int
    min_confidences: Sequence[float] = ()
    num_ahead_tokens: int = 0
    min_ahead_confidence: float = 0.0

    def within(self, room: int) -> Plan:
        """Return a plan whose tokens, the guess included, are no more than so many, at least 0."""
        k = min(self.num_draft_tokens, room)
        return replace(self, num_draft_tokens=k, num_ahead_tokens=max(min(self.num_ahead_tokens, room - k - 1), 0))


@dataclass(frozen=True)
class RoundCosts:
    """What the parts of a round cost now, in seconds.

    `draft[k]` is the time for k draft tokens, `verify[k]` that of verifying them; both go as far as k may. `asking` is
    what it takes to ask the draft, besides, and `always` what every round takes besides. A round without a draft takes
    `alone` times as long as its parts say, in comparison to those with one.
    """

    draft: Sequence[float]
    verify: Sequence[float]
    asking: float
    always: float
    alone: float = 1.0

    @property
    def target_only(self) -> float:
        """Seconds of a round without a draft, which emits one token."""
        return self.alone * (self.always + self.verify[0])


@dataclass(frozen=True)
class JointPlan:
    """How many draft tokens each of several sessions is to have in the rounds that they share.

    `tokens` says how many each should get of a round, and `seconds` what that should take by its parts.
    """

    num_draft_tokens: Mapping[Hashable, int]
    tokens: Mapping[Hashable, float]
    seconds: float

    @property
    def drafts(self) -> bool:
        """Whether any of them has any."""
        return any(self.num_draft_tokens.values())

    @property
    def rate(self) -> float:
        """Tokens per second of all of them."""
        return sum(self.tokens.values()) / self.seconds


@dataclass(frozen=True)
class Acceptance:
    """What becomes of proposals by place, the first place first.

    `reached[i]` is the part of the proposals that have a place i, where they may go so far; `accepted[i]` the part
    whose tokens up to place i are all accepted. Both have as many places as there may be draft tokens.
    """

    reached: Sequence[float]
    accepted: Sequence[float]


def choose_num_draft_tokens(acceptance: Acceptance, costs: RoundCosts, least_gain: float = 1.0) -> tuple[int, float]:
    """Return the k with the most expected tokens per second, and that rate.

    A round with up to k draft tokens emits 1 + sum(accepted[:k]) tokens (Leviathan et al., arXiv 2211.17192,
    equation 1, without its assumption that all places are alike). Proposals that reach place k end there, the others
    earlier, and each takes the time of its own length. With k = 0 the target decodes alone, whose rate must be beaten
    `least_gain` times. A k that hardly any proposal reaches is not looked at.
    """
    alone = 1 / costs.target_only
    best = (0, alone)
    tokens, ended_before = 1.0, 0.0
    previous = 1.0
    for k, (reached, accepted) in enumerate(zip(acceptance.reached, acceptance.accepted, strict=True), start=1):
        if reached < _LEAST_REACHED:
            break
        ended_before += (previous - reached) * (costs.draft[k - 1] + costs.verify[k - 1])
        tokens += accepted
        seconds = ended_before + reached * (costs.draft[k] + costs.verify[k])
        rate = tokens / (costs.always + costs.asking + seconds)
        if rate > max(best[1], least_gain * alone):
            best = (k, rate)
        previous = reached
    return best


def plan_alone(sessions: Iterable[Hashable], costs: RoundCosts) -> JointPlan:
    """Return the plan of several sessions that none drafts for."""
    sessions = list(sessions)
    return JointPlan(dict.fromkeys(sessions, 0), dict.fromkeys(sessions, 1.0), costs.always + costs.verify[0])


def choose_together(accepted: Mapping[Hashable, Sequence[float]], costs: RoundCosts) -> JointPlan:
    """Plan rounds that several sessions share, for the most expected tokens per second.

    `accepted[session][j]` is how often the session's first j + 1 draft tokens are all accepted; it must not rise with
    j. The costs are those of a round that all share: the draft takes as long as for the longest proposal, the target as
    long as for as many tokens in equal parts. So up to each length the likeliest tokens come first, whosever they are,
    as many of them as pay.
    """
    num_sessions = len(accepted)
    likeliest = sorted(
        (
            (probability, session, j)
            for session, own in accepted.items()
            for j, probability in enumerate(own)
            if probability >= _LEAST_ACCEPTANCE
        ),
        key=lambda token: (-token[0], token[2]),
    )
    verify = [_between(costs.verify, count / num_sessions) for count in range(len(likeliest) + 1)]
    best_rate, best_longest, best_count = num_sessions / costs.target_only, 0, 0
    for longest in range(1, 1 + max((j + 1 for _, _, j in likeliest), default=0)):
        fixed = costs.always + costs.asking + costs.draft[longest]
        tokens, count = float(num_sessions), 0
        for probability, _, j in likeliest:
            if j < longest:
                tokens, count = tokens + probability, count + 1
                rate = tokens / (fixed + verify[count])
                if rate > best_rate:
                    best_rate, best_longest, best_count = rate, longest, count
    if best_count == 0:
        return plan_alone(accepted, costs)
    chosen = Counter([session for _, session, j in likeliest if j < best_longest][:best_count])
    return JointPlan(
        {session: chosen[session] for session in accepted},
        {session: 1 + sum(own[: chosen[session]]) for session, own in accepted.items()},
        costs.always + costs.asking + costs.draft[best_longest] + verify[best_count],
    )


def _between(values: Sequence[float], place: float) -> float:
    """Draw lines between the values."""
    i = min(int(place), len(values) - 2)
    return values[i] + (place - i) * (values[i + 1] - values[i])


def stopping_thresholds(costs: RoundCosts, rate: float, next_acceptance: float, num_draft_tokens: int) -> list[float]:
    """Return how likely the first i = 1, 2, ... tokens must be accepted as a whole for going on to pay, in [0, 1].

    When that is looked at, there is a token more, which the proposal ends with: the device does not wait in between.
    Going on from it to j tokens costs the draft steps and what they add to the verify. It brings the tokens after it,
    each worth 1 / rate seconds (what maximises a rate, Dinkelbach 1967), if everything before is accepted, and then
    each with probability `next_acceptance` after the other. It pays if it does for any j up to `num_draft_tokens`: over
    a step in the verify's cost it takes a jump.
    """
    thresholds = []
    for i in range(1, num_draft_tokens):
        least, tokens, probability = 1.0, 0.0, next_acceptance
        for j in range(i + 2, num_draft_tokens + 1):
            probability *= next_acceptance
            tokens += probability
            added = costs.draft[j] - costs.draft[i + 1] + costs.verify[j] - costs.verify[i + 1]
            least = min(least, max(added, 0.0) * rate / tokens)
        thresholds.append(least if tokens else 0.0)
    return thresholds
