"""How far each of several sessions goes while they share the workers' steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from coordinator.load_trials import Expected, LoadTrials
from coordinator.plan import JointPlan, RoundCosts, choose_together, plan_alone

# Drafting that does not pay is tried all the same where it would if rounds without drafts took so many times as long:
# this much a forecast may be wrong.
_OPTIMISM = 1.3
# A session that is likely to get less than this part of the tokens that it was to have is no longer waited for.
_DISAPPOINTING = 0.8


class SharedRounds:
    """Plans rounds for all sessions at once, a stretch of some rounds at a time, and tries what it is not sure of."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self._trials = LoadTrials(clock)
        self._costs: RoundCosts | None = None
        self._num_draft_tokens: dict[Hashable, int] = {}
        self._tokens: Mapping[Hashable, float] = {}  # that each should get of a round
        self._is_outdated = False
        self._is_due = self._is_trial = False

    @property
    def alone(self) -> float:
        """How many times as long as foretold rounds take without drafts, in comparison to those with them."""
        return self._trials.alone

    @property
    def is_trial(self) -> bool:
        """Whether the sessions do what they usually do not, in this stretch."""
        return self._is_trial

    def next_stretch(self, num_sessions: int) -> None:
        """Begin a stretch of rounds of so many sessions."""
        self._trials.next_stretch(num_sessions)

    def num_draft_tokens(
        self, session: Hashable, sessions: Callable[[], Mapping[Hashable, Sequence[float]]], costs: RoundCosts
    ) -> int:
        """Return k for a session.

        `sessions` returns how often each of their first draft tokens, up to a place, are all accepted; it is asked when
        there are new costs or a new session, or one is to be reconsidered.
        """
        if costs is not self._costs or session not in self._num_draft_tokens or self._is_outdated:
            self._plan(sessions(), costs)
        return self._num_draft_tokens[session]

    def observe(self, session: Hashable, seconds: float) -> None:
        """Learn what a round of a session took."""
        self._trials.observe(session, seconds)

    def reconsider(self, session: Hashable, accepted: Sequence[float]) -> None:
        """Plan anew if a session's tokens turn out to be accepted far less than was expected."""
        k = self._num_draft_tokens.get(session, 0)
        if k and 1 + sum(accepted[:k]) < _DISAPPOINTING * self._tokens[session]:
            self._is_outdated = True

    def _plan(self, sessions: Mapping[Hashable, Sequence[float]], costs: RoundCosts) -> None:
        """Plan for these sessions, in a stretch that begins, or has begun when another session comes."""
        accepted = list(sessions.values())
        plan = choose_together(accepted, costs)
        if costs is not self._costs:
            self._is_due = self._trials.is_due
        usual = expected = _expected(plan, sessions, costs)
        other = self._other_way(plan, accepted, costs) if self._is_due else plan
        self._is_trial = other.drafts is not plan.drafts
        if self._is_trial:
            plan, expected = other, _expected(other, sessions, costs)
        self._trials.expect(expected, instead_of=usual if self._is_trial else None)
        self._costs, self._is_outdated = costs, False
        self._num_draft_tokens = dict(zip(sessions, plan.num_draft_tokens, strict=True))
        self._tokens = expected.tokens

    def _other_way(self, plan: JointPlan, accepted: Sequence[Sequence[float]], costs: RoundCosts) -> JointPlan:
        if plan.drafts:
            return plan_alone(len(accepted), costs)
        return choose_together(accepted, replace(costs, alone=_OPTIMISM * costs.alone))


def _expected(plan: JointPlan, sessions: Iterable[Hashable], costs: RoundCosts) -> Expected:
    """Return what a plan should come to by the parts of a round, without what was learnt of rounds without drafts."""
    seconds = plan.seconds if plan.drafts else plan.seconds / costs.alone
    return Expected(plan.drafts, dict(zip(sessions, plan.tokens, strict=True)), seconds)
