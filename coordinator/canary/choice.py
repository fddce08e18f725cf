"""The choice between the present draft and the canary for one session, before each of its rounds."""

from __future__ import annotations

from collections.abc import Hashable

from coordinator.canary.canary import Canary
from coordinator.canary.evidence import Evidence
from coordinator.canary.judgement import ROUNDS_OF_A_SESSION, CanaryState
from coordinator.core import Plan, Round
from coordinator.planner.round_costs import RoundCosts
from coordinator.planner.session_planner import MOST_NEW_TOKENS
from coordinator.proposals.drafter import DraftStream
from coordinator.proposals.drafts import Drafts
from specd.vocabulary import TokenSource


class CanaryChoice:
    """Leads a session to the canary, for its first rounds at most, and shows these rounds to the judgement.

    A session that the canary fails leaves it for good, and counts with all rounds that it would have had.
    """

    def __init__(self, canary: Canary, kind: Hashable) -> None:
        """Begin a session that does some kind of work."""
        self._canary, self._kind = canary, kind
        self._counts = canary.is_on_trial  # whether its rounds are evidence
        self._has_canary = self._counts and canary.assign()
        self._num_rounds = 0  # with the draft that it began with
        self._num_proposals = 0
        self._evidence: dict[bool, Evidence] = {}  # by whether it ran alone
        self.is_canary = False
        self.choose()

    def choose(self) -> None:
        """Choose the draft of the next round."""
        is_kept = self._canary.state is CanaryState.KEPT
        self.is_canary = self._canary.is_used(wanted=is_kept or (self._has_canary and self._is_counted))

    @property
    def _is_counted(self) -> bool:
        return self._counts and self._num_rounds < ROUNDS_OF_A_SESSION

    def drafts(self) -> Drafts[DraftStream]:
        """Return the drafts of which one proposes in the present round."""
        return self._canary.drafts[self.is_canary]

    def observe(self, plan: Plan, round_: Round, costs: RoundCosts, *, alone: bool) -> None:
        """Count a round after the first, at these costs of the target and of its draft; `alone` in its steps or not."""
        if not self._is_counted or self.is_canary != self._has_canary:
            return
        has_failed = self.is_canary and bool(round_.proposal.drafted.fault)
        number = ROUNDS_OF_A_SESSION - self._num_rounds if has_failed else 1
        self._num_rounds += number
        self._add(plan, round_, costs, alone=alone)
        if self.is_canary:
            self._canary.count_rounds(number, costs.target())

    def _add(self, plan: Plan, round_: Round, costs: RoundCosts, *, alone: bool) -> None:
        judgement, drafted, verdict = self._canary.judgement, round_.proposal.drafted, round_.verdict
        if alone not in self._evidence:
            self._evidence[alone] = judgement.begin((self._kind, alone), is_canary=self.is_canary)
        if not (limit := plan.limit(TokenSource.DRAFT)):
            return
        evidence, num_drafted = self._evidence[alone], len(drafted.token_ids)
        evidence.add(limit, num_drafted, min(verdict.num_accepted, num_drafted))
        self._num_proposals += 1
        draft, target, exchange, step = costs.draft(), costs.target(), drafted.exchange, verdict.exchange
        # The first proposal may wait for the draft's prefill.
        if num_drafted and draft is not None and self._num_proposals > 1 and exchange.num_tokens <= MOST_NEW_TOKENS:
            evidence.seconds += exchange.seconds
            evidence.expected_seconds += draft.seconds(exchange.num_sessions, num_drafted)
        if target is not None and step.num_tokens <= MOST_NEW_TOKENS and not verdict.was_retried:
            width = step.step_tokens / step.num_sessions
            judgement.add_step(step.num_sessions, step.seconds, target.mixed_seconds(step.num_sessions, width))
