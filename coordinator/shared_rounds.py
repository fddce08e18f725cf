"""How far each of several sessions goes while they share the workers' steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

from coordinator.load_trials import LoadTrials
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
        self._plan: JointPlan | None = None
        self._costs: RoundCosts | None = None  # that it was made with; None where it is to be made anew

    @property
    def alone(self) -> float:
        """How many times as long as foretold rounds take without drafts, in comparison to those with them."""
        return self._trials.alone

    @property
    def is_trial(self) -> bool:
        """Whether the sessions do what they usually do not, in this stretch."""
        return self._trials.is_trial

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
        if self._plan is None or costs is not self._costs or session not in self._plan.num_draft_tokens:
            self._plan, self._costs = self._new_plan(sessions(), costs), costs
        return self._plan.num_draft_tokens[session]

    def observe(self, session: Hashable, seconds: float) -> None:
        """Learn what a round of a session took."""
        self._trials.observe(session, seconds)

    def reconsider(self, session: Hashable, accepted: Sequence[float]) -> None:
        """Plan anew if a session's tokens turn out to be accepted far less than was expected."""
        if self._plan is not None and session in self._plan.tokens:
            k = self._plan.num_draft_tokens[session]
            if k and 1 + sum(accepted[:k]) < _DISAPPOINTING * self._plan.tokens[session]:
                self._costs = None

    def _new_plan(self, accepted: Mapping[Hashable, Sequence[float]], costs: RoundCosts) -> JointPlan:
        """Plan for these sessions, in a stretch that begins, or in the middle of one."""
        usual = choose_together(accepted, costs)
        if self._trials.is_due:
            other = self._other_way(usual, accepted, costs)
            if other.drafts is not usual.drafts:
                self._trials.expect(other, instead_of=usual)
                return other
        self._trials.expect(usual)
        return usual

    def _other_way(self, plan: JointPlan, accepted: Mapping[Hashable, Sequence[float]], costs: RoundCosts) -> JointPlan:
        if plan.drafts:
            return plan_alone(accepted, costs)
        return choose_together(accepted, replace(costs, alone=_OPTIMISM * costs.alone))
