"""Decides how far to speculate, from what rounds cost and what becomes of proposals, as both are measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import Protocol

from coordinator.acceptance_estimate import AcceptanceEstimate
from coordinator.confidence_scale import ConfidenceScale
from coordinator.plan import Acceptance, Plan, RoundCosts, choose_num_draft_tokens, stopping_thresholds
from coordinator.proposal_times import ProposalTimes
from coordinator.round import Exchange, Round
from coordinator.shared_acceptance import SharedAcceptance
from coordinator.shared_rounds import SharedRounds
from specd.moving_average import MovingAverage
from specd.sampling import Sampling
from specd.settings import MAX_NUM_DRAFT_TOKENS
from specd.step_costs import StepCosts

# One in so many rounds is decoded by the target alone, to know what that takes; the first of them come earlier.
_CONTROL_ROUNDS = 64
_FIRST_CONTROL_ROUNDS = frozenset((8, 16, 32))
_CONTROL_WEIGHT = 0.2
_LARGEST_SURPRISE = 2.0  # for a single one
# How many times as fast as the target alone drafting must seem for a session to begin with it, and to go on. To begin
# costs what the draft takes for the session's tokens, and forecasts can be wrong.
_GAIN_TO_BEGIN = 1.06
_GAIN_TO_GO_ON = 1.02
# Where drafting does not pay, it is tried again when what the last trial cost is less than this part of the time since.
_PROBE_SHARE = 0.0025
_FIRST_PROBE_SECONDS = 20.0
# Draft tokens of a trial: how often the first is accepted says most, and a slow draft takes long for more.
_PROBE_DRAFT_TOKENS = 2
# For so many rounds the draft goes ahead against the better knowledge, to renew it, and then for so many times as many
# only where it pays.
_AHEAD_TRIAL_ROUNDS = 8
_AHEAD_TRIALS = 64
# Tokens of the session that are new to a worker in an ordinary round: those since it was last asked, which for a draft
# can be some rounds ago.
_MOST_NEW_TOKENS = 8
# For so many rounds of a session the costs, and what follows from them, are not worked out anew; for so many of each
# where there are several: while they change from one k to another, they do not fit into one step.
_RENEWED_ROUNDS = 4
_RENEWED_ROUNDS_OF_SEVERAL = 8
_WEIGHT = 0.05  # of a new value in an average
_AHEAD_WEIGHT = 0.2  # of one that costs something to get

# What rounds cost besides the models before any was seen, in seconds: two messages on one host.
_FIRST_ASKING = 0.0005
_FIRST_ALWAYS = 0.001
# By how much a verify takes longer while the draft goes ahead, before that was seen.
_FIRST_SLOWDOWN = 0.1


class Link(Protocol):
    """What is known of a worker."""

    @property
    def step_costs(self) -> StepCosts | None:
        """What steps of its model cost; None while there is no such worker."""


class Speculation:
    """What all sessions together know of the costs of rounds and of the fate of proposals."""

    def __init__(
        self,
        target: Link,
        draft: Link,
        *,
        draft_ahead: str,
        clock: Callable[[], float],
    ) -> None:
        """`draft_ahead` is the setting; `clock` returns seconds."""
        self._draft_ahead = draft_ahead
        self._target = target
        self._draft = draft
        self._clock = clock
        self._kinds: dict[object, _Kind] = {}
        self._sessions: dict[SessionSpeculation, None] = {}  # that run now, in the order in which they began
        self._shared_rounds = SharedRounds(clock)
        self._proposal_times = ProposalTimes()
        self._asking = MovingAverage(_WEIGHT, _FIRST_ASKING)
        self._always = MovingAverage(_WEIGHT, _FIRST_ALWAYS)
        self._slowdown = {True: MovingAverage(_AHEAD_WEIGHT, _FIRST_SLOWDOWN), False: MovingAverage(_WEIGHT, 0.0)}
        self._alone = _Alone()
        # What rounds take more than their parts should, with going ahead and without.
        self._excess = {went_ahead: MovingAverage(_WEIGHT, 0.0) for went_ahead in (True, False)}
        self._num_rounds = 0
        self._probe_at = clock() + _FIRST_PROBE_SECONDS
        self._costs: RoundCosts | None = None
        self._costs_until = 0
        self._costs_are_shared = False

    def begin(self, sampling: Sampling, num_draft_tokens: int | None) -> SessionSpeculation:
        """Begin to decide for a session, if the k is not given that it wants. It runs until it is closed."""
        # How much a draft hits depends on the temperature more than on the text.
        kind = (sampling.acceptance, round(sampling.temperature, 1))
        if kind not in self._kinds and len(self._kinds) < 1000:
            self._kinds[kind] = _Kind()
        session = SessionSpeculation(self, self._kinds.get(kind) or _Kind(), num_draft_tokens)
        self._sessions[session] = None
        return session

    def end(self, session: SessionSpeculation) -> None:
        """Take note that a session runs no more."""
        self._sessions.pop(session, None)

    @property
    def is_shared(self) -> bool:
        """Whether several sessions share the workers' steps."""
        return len(self._sessions) > 1

    def costs(self) -> RoundCosts | None:
        """Return what the parts of a round cost now; None without a draft."""
        target, draft = self._target.step_costs, self._draft.step_costs
        if target is None or draft is None:
            return None
        is_due = self._num_rounds >= self._costs_until or self._costs_are_shared is not self.is_shared
        if self._costs is None or is_due:
            self._shared_rounds.next_stretch(len(self._sessions))
            self._costs = self._new_costs(target, draft)
            self._costs_are_shared = self.is_shared
            each = _RENEWED_ROUNDS_OF_SEVERAL if self.is_shared else _RENEWED_ROUNDS
            self._costs_until = self._num_rounds + each * len(self._sessions)
        return self._costs

    def reconsider(self, session: SessionSpeculation) -> None:
        """Take note that another of a session's proposals was judged."""
        if self.is_shared:
            self._shared_rounds.reconsider(session, session.accepted())

    def choose_together(self, session: SessionSpeculation, costs: RoundCosts) -> int:
        """Return how far a session should go in rounds that it shares with the others that there are now."""
        return self._shared_rounds.num_draft_tokens(
            session, lambda: {each: each.accepted() for each in self._sessions if each.is_adaptive}, costs
        )

    def _new_costs(self, target: StepCosts, draft: StepCosts) -> RoundCosts:
        # All that run, not those that lately shared a step: where they take turns, each waits for the others' steps.
        sessions = len(self._sessions)
        verify = [target.seconds(sessions, width) for width in range(1, MAX_NUM_DRAFT_TOKENS + 2)]
        if sessions == 1:  # then the target pads a width up to a cheaper one
            verify = list(accumulate(reversed(verify), min))[::-1]
            verify[0] *= self._alone.factor
        return RoundCosts(
            draft=self._proposal_times.seconds(draft, sessions),
            verify=verify,
            asking=self._asking.value,
            always=self._always.value,
            alone=self._shared_rounds.alone if self.is_shared else 1.0,
        )

    def observe(self, session: SessionSpeculation, round_: Round, costs: RoundCosts, *, is_resumed: bool) -> None:
        """Learn what a round of a session took, after its first.

        A proposal that is resumed had some of its tokens before it was asked for, from going ahead.
        """
        draft, verify = round_.proposal.exchange, round_.verdict.exchange
        self._num_rounds += 1
        self._shared_rounds.observe(session, round_.seconds)
        if max(draft.num_tokens, verify.num_tokens) > _MOST_NEW_TOKENS:
            return  # a worker computed the prompt, or the session again
        k = round_.num_proposed
        usual = costs.always + costs.verify[k] + (costs.draft[k] + costs.asking if k else 0.0)
        self._excess[round_.went_ahead or round_.proposal.was_ahead].add(round_.seconds - usual)
        self._observe_verify(round_, verify)
        if draft.compute_seconds:
            self._asking.add(draft.wire_seconds + self._own_queue(draft))
            if self._draft.step_costs is not None and not is_resumed:
                self._proposal_times.observe(self._draft.step_costs, draft.num_sessions, k, draft.compute_seconds)
        self._always.add(verify.wire_seconds + self._own_queue(verify) + round_.coordinator_seconds)

    def _own_queue(self, exchange: Exchange) -> float:
        """Return the time in a worker's queue that is a cost of asking.

        Of several sessions one waits for the steps of the others, which are longer the further these speculate: as a
        fixed cost it would make each of them speculate further, and wait longer.
        """
        return 0.0 if self.is_shared else exchange.queue_seconds

    def _observe_verify(self, round_: Round, verify: Exchange) -> None:
        costs = self._target.step_costs
        if costs is None:
            return
        if self.is_shared:
            width = verify.step_tokens / verify.num_sessions
        else:  # the target pads it, and that is what took so long
            width = costs.cheapest_width(1, round_.num_proposed + 1)
        surprise = verify.compute_seconds / costs.seconds(verify.num_sessions, width)
        self._slowdown[round_.went_ahead].add(min(surprise - 1, 1.0))
        if not self.is_shared:
            self._alone.observe(surprise, drafted=round_.num_proposed > 0)
        # What going ahead adds is no part of the curve, from which it is decided whether to go ahead. Nor is a step for
        # one session while there are others: the worker leaves some of the cores to the draft then.
        if not round_.went_ahead and self.is_shared == (verify.num_sessions > 1):
            costs.observe(verify.num_sessions, width, verify.compute_seconds, part=1 / verify.num_sessions)

    @property
    def is_control_due(self) -> bool:
        """Whether the next round is to be the target's alone, for comparison.

        Not while several sessions share steps: for one that comes alone the others would wait.
        """
        number = self._num_rounds + 1
        return not self.is_shared and (number % _CONTROL_ROUNDS == 0 or number in _FIRST_CONTROL_ROUNDS)

    @property
    def is_probe_due(self) -> bool:
        """Whether drafting that did not pay should be tried again."""
        # What several sessions try, they try together.
        return self._clock() >= self._probe_at and not self._shared_rounds.is_trial

    def probed(self, cost_seconds: float) -> None:
        """Count a trial."""
        self._probe_at = self._clock() + max(cost_seconds, 0.0) / _PROBE_SHARE

    def ahead_threshold(self, num_draft_tokens: int, costs: RoundCosts) -> float:
        """Return how likely the guess must be right for going ahead to pay; more than 1 if it never does.

        A right guess saves a round its draft; to find out whether it is right costs the verify what both processes
        take from each other. Whether it comes out right on the whole is seen in what rounds take more or less than
        they should, with it and without.
        """
        if self._draft_ahead == "always":
            return 0.0
        if self._draft_ahead == "never" or self.is_shared:  # of several sessions, the others would pay
            return 2.0
        saving = costs.draft[num_draft_tokens] + costs.asking
        slowdown = self._slowdown[True].value - self._slowdown[False].value
        threshold = max(slowdown, 0.0) * costs.verify[num_draft_tokens] / max(saving, 1e-9)
        if self._num_rounds // _AHEAD_TRIAL_ROUNDS % _AHEAD_TRIALS == 0:
            return min(threshold, 0.5)
        return threshold if self._excess[True].value < self._excess[False].value else 2.0


class _Alone:
    """How many times as long as its costs say the target takes for a token of its own.

    The level of all costs follows the rounds that there are. While these are verifies, what is wrong with the curve
    between one token and several is wrong with the target alone, and nothing else says so but the control rounds.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._was_drafted = False

    def observe(self, surprise: float, *, drafted: bool) -> None:
        """Learn how many times as long as its costs say a round took the target."""
        if not drafted:
            surprise = min(max(surprise, 1 / _LARGEST_SURPRISE), _LARGEST_SURPRISE)
            self.factor += (surprise - self.factor) * (_CONTROL_WEIGHT if self._was_drafted else _WEIGHT)
        self._was_drafted = drafted


class _Kind:
    """What is known of the sessions whose tokens are chosen alike."""

    def __init__(self) -> None:
        self.acceptance = SharedAcceptance()
        self.scale = ConfidenceScale()


class SessionSpeculation:
    """Decides, round by round, for one session; with a k that is given, there is nothing to decide.

    A session that is alone goes as far as pays, and ends proposals early. Of several each goes as far as pays on the
    whole, and for some rounds always equally far: a step of the draft costs hardly less for some of them than for all,
    and those that come to the target at another time need a step of their own.
    """

    def __init__(self, shared: Speculation, kind: _Kind, given: int | None) -> None:
        self._shared = shared
        self._kind = kind
        self._acceptance = AcceptanceEstimate(kind.acceptance)
        self._given = given
        self._costs: RoundCosts | None = None
        self._k = 0
        self._min_confidences: list[float] = []
        self._is_probe = False
        self._has_gone_ahead = False

    def close(self) -> None:
        """End with the session."""
        self._shared.end(self)

    @property
    def is_adaptive(self) -> bool:
        """Whether how far to go is decided here."""
        return self._given is None

    def accepted(self) -> list[float]:
        """Return how often the session's first draft tokens, up to each place, are all accepted."""
        return self._acceptance.accepted()

    @property
    def will_draft(self) -> bool:
        """Whether the draft is likely to be asked soon, so that it should have the prompt."""
        if self._given is not None:
            return self._given > 0
        return self._forecast() > 0 or self._shared.is_probe_due

    def plan(self) -> Plan:
        """Decide how far to go in the next round."""
        if self._given is not None:
            self._costs = self._shared.costs()
            return Plan(self._given)
        k = self._forecast()
        self._is_probe = k == 0 and self._shared.is_probe_due
        if self._is_probe:
            k = _PROBE_DRAFT_TOKENS
        costs = self._costs
        if costs is None:
            return Plan(_PROBE_DRAFT_TOKENS)  # the Drafter says why there is nothing
        if k == 0 or self._shared.is_control_due:
            return Plan(0)
        threshold = self._shared.ahead_threshold(k, costs)
        if threshold > 1:
            return Plan(k, self._min_confidences)
        # One at least: whether to go ahead is decided by confidences.
        return Plan(k, self._min_confidences or (0.0,), k, self._kind.scale.confidence(threshold))

    def observe(self, plan: Plan, round_: Round) -> Round:
        """Learn from a round after the session's first; returns it with what it is worth by the costs of its parts."""
        costs = self._costs
        if costs is None or round_.proposal.fault:
            return round_
        num_tokens = len(round_.commit.token_ids)
        confidence = prod(round_.proposal.confidences)
        round_ = replace(
            round_,
            target_only_seconds=num_tokens * costs.target_only,
            went_ahead=plan.num_ahead_tokens > 0 and confidence >= plan.min_ahead_confidence,
            saved_seconds=costs.asking + costs.draft[round_.num_proposed] if round_.proposal.was_ahead else 0.0,
        )
        if self._given is None:
            self._observe_proposal(plan, round_)
        if self._is_probe:
            self._shared.probed(round_.seconds - round_.target_only_seconds)
        self._shared.observe(self, round_, costs, is_resumed=self._has_gone_ahead)
        self._has_gone_ahead = round_.went_ahead
        return round_

    def _observe_proposal(self, plan: Plan, round_: Round) -> None:
        if plan.num_draft_tokens:
            num_accepted = round_.commit.num_accepted
            self._acceptance.observe(plan.num_draft_tokens, round_.num_proposed, num_accepted)
            self._shared.reconsider(self)
            self._kind.scale.observe(round_.proposal.confidences, num_accepted)
        else:
            self._acceptance.fade()

    def _forecast(self) -> int:
        """Return how far to go by what rounds should cost."""
        costs = self._shared.costs()
        before, self._costs = self._costs, costs
        if costs is not None and self._shared.is_shared:
            self._k, self._min_confidences = self._shared.choose_together(self, costs), []
        elif costs is not None and costs is not before:
            acceptance = Acceptance(self._acceptance.reached(), self._acceptance.accepted())
            gain = _GAIN_TO_GO_ON if self._k else _GAIN_TO_BEGIN
            self._k, rate = choose_num_draft_tokens(acceptance, costs, gain)
            least = stopping_thresholds(costs, rate, acceptance.accepted[0], self._k)
            self._min_confidences = [self._kind.scale.confidence(acceptance) for acceptance in least]
        return self._k
