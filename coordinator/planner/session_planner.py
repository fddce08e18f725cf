"""Plans of the rounds of one session."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from coordinator.core import Match, Plan, Round
from coordinator.planner.acceptance import PassRates, Proposals
from coordinator.planner.planner import Planner
from coordinator.planner.round_costs import size_class
from coordinator.planner.window import LEAST_GAIN, Window
from coordinator.sources import Sources
from specd.sampling import Sampling
from specd.setting_types import MAX_NUM_DRAFT_TOKENS
from specd.step_costs import MovingAverage
from specd.vocabulary import TokenSource

# A request with more of the session's tokens than this is a prefill, a replay, or a draft that catches up.
MOST_NEW_TOKENS = 8
_PACE_WEIGHT = 1 / 64  # of a round in its client's pace
_LEAST_CONFIDENCE = 0.7  # product of confidences at which a proposal continues
_FIRST_ACCEPTANCE = 0.7
_ALL_SOURCES = Sources()


class SessionPlanner:
    """Plans the rounds of a session: the k of the window, or looked-up tokens where they promise more."""

    def __init__(
        self,
        shared: Planner,
        sampling: Sampling,
        sources: Sources = _ALL_SOURCES,
        *,
        client: str,
        is_paused: Callable[[], bool] = lambda: False,
        asks_ahead: bool = False,
    ) -> None:
        """Plan for a client's session with these sources. It counts until it is closed, unless `is_paused`.

        `asks_ahead` is whether the target drafts: a round then asks it for the draft tokens of the next round.
        """
        self.client = hashlib.sha256(client.encode()).hexdigest()[:16]
        self.is_paused, self._sources, self._asks_ahead = is_paused, sources, asks_ahead
        self._drafts = TokenSource.DRAFT in sources.allowed
        self.may_draft = self._drafts and sources.k is None
        self.has_fault = False  # the draft did not answer in the last round
        self._learns_alone = sampling.changes_logits  # other tokens are likely under a bias
        self._kind = kind_of(sampling)
        self._join(shared)

    def _join(self, shared: Planner) -> None:
        self.shared = shared
        self.is_prefilling = True
        self.num_claimed, self.ended_at, self._last_seconds = 0, 0.0, 0.0
        self.planned_at = shared.running.num_rounds  # the number of rounds of all sessions when it last planned
        client = shared.join(self)
        self._paces, self._pools = client.paces, {} if self._learns_alone else client.pools
        self._own: dict[bool, Proposals] = {}
        self._of_match: PassRates | None = None
        self._asked = Plan()  # of draft tokens, if the round before has asked for this round's
        self._follows: PassRates | None = None  # how often a match is used behind a round like the last
        self._window: Window | None = None
        self._is_settled = False  # whether the sessions had this k in the round before, too

    def move(self, shared: Planner) -> None:
        """Continue with the planner of another target, in the middle of a round."""
        self.close()
        self._join(shared)

    def drafts_with(self, planner: object) -> bool:
        """Return whether it has this planner, and its rounds may have draft tokens."""
        return self.shared is planner and self.may_draft and not self.has_fault

    def proposals(self, *, alone: bool) -> Proposals:
        """Return how far this session's proposals get, which end early if it runs alone.

        It begins with what the client's other sessions taught, as far as a few tokens: texts differ too much for more.
        """
        of_client = self._of_client(alone=alone)
        if alone not in self._own:
            self._own[alone] = of_client.begun()
        own = self._own[alone]
        own.expect(of_client)  # sessions of a new client that begin together learn together
        return own

    @property
    def runs_alone(self) -> bool:
        """Whether no other session shares the steps of the present round: its proposals then end early."""
        return self._window is not None and self._window.num_active == 1

    def close(self) -> None:
        """End with the session."""
        self.shared.running.remove(self)

    def will_draft(self) -> bool:
        """Return whether the draft is likely to be asked soon, so that it should have the prompt."""
        window = self.shared.window()
        return self._drafts and bool(self._sources.k or (self.may_draft and window is not None and window.k))

    def plan(self, matches: Sequence[Match] = ()) -> Plan:
        """Plan the next round, for which sources have these matches."""
        plan = self._choose(matches)
        if plan.limits.keys() - {TokenSource.DRAFT} and (window := self._window) is not None:
            num_replaced = 0 if plan.limit(TokenSource.DRAFT) else window.num_replaced
            matched = sum(limit for source, limit in plan.limits.items() if source is not TokenSource.DRAFT)
            self.num_claimed = max(matched - num_replaced, 0)
        return plan

    def _choose(self, matches: Sequence[Match]) -> Plan:
        self.planned_at = self.shared.running.num_rounds
        before, self._window = self._window, self.shared.window()
        window, k = self._window, self._sources.k
        self._is_settled = before is not None and window is not None and before.k == window.k
        if k is not None:
            return Plan(dict.fromkeys(self._sources.allowed, k), most=k)
        if window is not None and (matches or self._asks_ahead) and (plan := self._plan_match(window, matches)):
            return plan
        if self.may_draft and self.shared.costs.draft() is None:
            return Plan({TokenSource.DRAFT: 1})  # the Drafter reports why there is no draft
        plan = self._asked if self._asks_ahead else self._plan_draft()
        return self._lengthened(plan, window, matches) if window is not None and plan.limits and matches else plan

    def ahead(self) -> Plan:
        """Return how many draft tokens the next round is likely to have, for a target that proposes them ahead."""
        if self._sources.k is not None:
            return Plan({TokenSource.DRAFT: self._sources.k} if self._drafts else {})
        plan, window = self._plan_draft(), self._window
        if plan.limits and window is not None and not window.is_trial and not self._pays_ahead(window):
            plan = Plan()
        self._asked = plan
        return plan

    def _pays_ahead(self, window: Window) -> bool:
        """Return whether a proposal for the next round is worth its time, though a match may replace it.

        A proposal serves a part of the text without matches, and the number of tokens in that part is fixed. So a
        second is worth the tokens that rounds with proposals emit in it, although rounds with matches emit more.
        """
        if self._follows is None:
            return True
        proposing = self.shared.costs.proposing_seconds(window.num_active, window.length)
        target_only = self.shared.seconds_by_match(window)[0]
        rate = window.tokens / window.seconds
        gain = window.tokens - 1 - rate * (window.seconds - proposing - target_only)
        return (1 - self._follows.mean()) * gain >= rate * proposing

    def _plan_draft(self) -> Plan:
        window = self._window
        if window is None or not self.may_draft or not window.k:
            return Plan()
        ends_early = window.num_active == 1  # several sessions would leave their common steps
        return Plan({TokenSource.DRAFT: window.k}, (_LEAST_CONFIDENCE,) * (window.k - 1) if ends_early else ())

    def observe(self, plan: Plan, round_: Round) -> float:
        """Learn from a round after the first; return the target-only seconds for its tokens, 0 if not known."""
        self.shared.num_rounds += 1
        self.shared.running.num_rounds += 1
        self.is_prefilling = False
        self.num_claimed, self.ended_at, self._last_seconds = 0, round_.ended_at, round_.seconds
        drafted, verdict, window = round_.proposal.drafted, round_.verdict, self._window
        self.has_fault, num_drafted = bool(drafted.fault), len(drafted.token_ids)
        if window is None or self.has_fault:
            return 0.0
        num_new = max(drafted.exchange.num_tokens, verdict.exchange.num_tokens)
        is_typical = (
            num_new <= MOST_NEW_TOKENS
            and not verdict.was_retried
            and self.shared.running.are_those_of(window)
            and not any(each.is_prefilling for each in self.shared.running.sessions)
        )
        if is_typical:
            tokens, seconds = self._pace(window)
            tokens.add(1 + verdict.num_accepted)
            seconds.add(round_.seconds)
        if is_typical and round_.num_proposed == num_drafted and (self._is_settled or window.num_active == 1):
            window.num_rounds += 1
            window.num_drafted += num_drafted
            window.measured_seconds += round_.seconds
            # Others in the step may have had more tokens, such as looked-up ones.
            step = verdict.exchange
            num_others = step.step_tokens / step.num_sessions - 1 - num_drafted
            window.expected_seconds += self.shared.costs.seconds(window.num_active, num_drafted, num_others)
            self.shared.measured_seconds += round_.seconds / window.num_active
        # The target's own count of what it accepted: a text that ends rejects nothing.
        if self._sources.k is None and num_drafted:
            alone, num_accepted = window.num_active == 1, min(verdict.num_accepted, num_drafted)
            for proposals in (self.proposals(alone=alone), self._of_client(alone=alone)):
                proposals.add(plan.limit(TokenSource.DRAFT), num_accepted, num_drafted)
        num_matched = round_.num_proposed - num_drafted
        if self._sources.k is None and num_matched and self._of_match is not None:
            for rates in (self._of_match,) if num_drafted else (self._of_match, self._of_matches()):
                rates.add(num_matched, max(verdict.num_accepted - num_drafted, 0))
        return len(round_.commit.token_ids) * self.shared.costs.seconds(window.num_active, 0)

    def _plan_match(self, window: Window, matches: Sequence[Match]) -> Plan | None:
        """Return a plan with the matched tokens that promise more than a proposal of the draft; in a trial, any one.

        They cost only their verification, in a step that is shared with the other sessions' tokens. A round is worth
        its tokens less those that a session emits elsewhere in its time (Dinkelbach, 1967: what maximises a ratio).
        """
        rate = self._tokens_per_second(window)
        seconds = self.shared.seconds_by_match(window, self._claimed_by_others())
        best, plan = -math.inf, Plan()
        for match in matches:
            rates = self._of_matches_like(match)
            rates.expected = self._of_matches().mean()
            rates.forget()
            most = min(len(match.token_ids), MAX_NUM_DRAFT_TOKENS)
            length, worth = _best_length(rates, rate, seconds[: most + 1])
            worth += 1 - rate * seconds[0]
            if length and worth > best:
                best, plan, self._of_match = worth, Plan({match.source: length}), rates
        least_gain = 1.0 if window.is_trial else LEAST_GAIN
        other = least_gain * window.tokens - rate * window.seconds
        if self._asks_ahead:
            self._count_follower(is_match=best > other)
            if not self._asked.limits:  # there is no proposal: the other choice is an ordinary step
                other = least_gain - rate * seconds[0]
        if best > other:
            return plan
        if not (window.is_trial and matches):
            return None
        self._of_match = self._of_matches_like(matches[0])
        return Plan({matches[0].source: 1})

    def _claimed_by_others(self) -> int:
        """Return how many matched tokens others have planned for the step of the round to plan.

        The rounds of a step end together, and their sessions plan one after the other.
        """
        return self.shared.running.claimed_since(self.ended_at - self._last_seconds / 2)

    def _count_follower(self, *, is_match: bool) -> None:
        """Count whether a match is the better choice in this round, by whether one was in the round before."""
        if self._follows is not None:
            self._follows.add(1, is_match)
        self._follows = self._rates(f"match behind {is_match:d}", 0.0)

    def _lengthened(self, plan: Plan, window: Window, matches: Sequence[Match]) -> Plan:
        """Return the plan with matched tokens behind the draft's, as many as promise more tokens than their time costs.

        They are those of the first match. Look-up proposes them only if its match begins with the draft's tokens.
        """
        source, evidence = matches[0].source, matches[0].evidence
        rates = self._of_match = self._rates(f"agreed {evidence}", _FIRST_ACCEPTANCE)
        rates.forget()
        seconds = self.shared.seconds_by_match(window, self._claimed_by_others())[round(window.length) :]
        length, _ = _best_length(rates, self._tokens_per_second(window), seconds)
        return replace(plan, limits={**plan.limits, source: length}) if length else plan

    def _pace(self, window: Window) -> tuple[MovingAverage, MovingAverage]:
        """Return the tokens and the seconds of the client's latest rounds, beside about as many sessions."""
        new = MovingAverage(_PACE_WEIGHT), MovingAverage(_PACE_WEIGHT)
        return self._paces.setdefault(size_class(window.num_active), new)

    def _tokens_per_second(self, window: Window) -> float:
        """Return what a session emits: as expected with a draft, or as measured lately, if that is more."""
        tokens, seconds = self._pace(window)
        return max(window.tokens / window.seconds, tokens.value / (seconds.value or 1.0))

    def _of_client(self, *, alone: bool) -> Proposals:
        """Return how far the proposals of all the client's sessions get."""
        accepted, proposed = f"accepted {alone:d}", f"proposed {alone:d}"
        return Proposals(self._rates(accepted, _FIRST_ACCEPTANCE), self._rates(proposed, 1.0))

    def _of_matches_like(self, match: Match) -> PassRates:
        """Return how far matches with the same evidence are accepted."""
        return self._rates(f"match {match.evidence}", _FIRST_ACCEPTANCE)

    def _of_matches(self) -> PassRates:
        """Return how far matches are accepted, by whatever evidence."""
        return self._rates("match", _FIRST_ACCEPTANCE)

    def _rates(self, what: str, expected: float) -> PassRates:
        """Return what sessions with this kind of sampling share."""
        return self._pools.setdefault(f"{self._kind} {what}", PassRates(expected))


def kind_of(sampling: Sampling) -> str:
    """Return the kind of sampling: acceptance depends on the temperature more than on the text."""
    return f"{sampling.acceptance.value} {min(round(2 * sampling.temperature), 8)}"


def _best_length(rates: PassRates, rate: float, seconds: Sequence[float]) -> tuple[int, float]:
    """Return the number of further tokens that is worth most, and that worth, in tokens.

    A round with i of them takes `seconds[i]`. A second is worth `rate` tokens.
    """
    accepted = [0.0, *accumulate(rates.survival(len(seconds) - 1))]
    worths = [tokens - rate * (each - seconds[0]) for tokens, each in zip(accepted, seconds, strict=True)]
    length = max(range(len(worths)), key=worths.__getitem__)
    return length, worths[length]
