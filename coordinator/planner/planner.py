"""The planner: how many tokens each round of each session proposes, and by whom."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from coordinator.core import Match, Plan, Round
from coordinator.planner.acceptance import PassRates, Proposals, mean_seconds
from coordinator.planner.round_costs import Measured, RoundCosts, size_class
from coordinator.planner.running import Running
from coordinator.planner.window import WINDOW_ROUNDS, Window
from coordinator.sources import Sources
from specd.sampling import Sampling
from specd.setting_types import MAX_NUM_DRAFT_TOKENS
from specd.step_costs import MovingAverage
from specd.vocabulary import TokenSource

_FIRST_TRIAL_ROUNDS = 10
_LEAST_LOSS = 0.1  # part of the time of a trial that it is taken to cost, as looked-up tokens are tried, too
_TRIAL_SHARE = 0.01  # of the time, which trials of another k may cost
_PACE_WEIGHT = 1 / 64  # of a round in its client's pace
_LEAST_GAIN = 1.02  # by which another k, or looked-up tokens, must promise more than the present k
_LEAST_CONFIDENCE = 0.7  # product of confidences at which a proposal continues
_FIRST_ACCEPTANCE = 0.7
# A request with more of the session's tokens than this is a prefill, a replay, or a draft that catches up.
MOST_NEW_TOKENS = 8
_MOST_CLIENTS, _MOST_KEPT_CLIENTS = 128, 16
_ALL_SOURCES = Sources()


@dataclass
class _Client:
    """A client, by its sessions: how far proposals get, by kind, and how fast its latest rounds were.

    `paces` has the tokens and the seconds of a round, by class of numbers of sessions.
    """

    pools: dict[str, PassRates] = field(default_factory=dict)
    paces: dict[int, tuple[MovingAverage, MovingAverage]] = field(default_factory=dict)


class Planner:
    """What the sessions of a draft share: the costs of rounds, what each client has taught, and the present window."""

    def __init__(self, costs: RoundCosts, running: Running[SessionPlanner] | None = None) -> None:
        """Plan for those of the `running` sessions that begin here; the others share the target with them."""
        self.costs = costs
        self.running = running or Running()
        self.num_rounds = self._num_trials = 0
        # Trials may cost a part of this time: idle time, prefills and faults neither pay for a trial nor prolong it.
        self.measured_seconds = 0.0
        # What one client teaches must neither mislead others nor tell them anything (vllm-project/vllm#57533).
        self.clients: OrderedDict[str, _Client] = OrderedDict()
        self._best_k: dict[int, int] = {}  # by class of numbers of sessions
        self._window: Window | None = None
        self._trial_at = 0.0

    def begin(
        self,
        sampling: Sampling,
        sources: Sources = _ALL_SOURCES,
        *,
        client: str,
        is_paused: Callable[[], bool] = lambda: False,
    ) -> SessionPlanner:
        """Begin to plan for a client's session with these sources. It counts until it is closed, unless `is_paused`."""
        name = hashlib.sha256(client.encode()).hexdigest()[:16]
        return SessionPlanner(self, name, sampling, sources, is_paused)

    def join(self, session: SessionPlanner) -> _Client:
        """Count a session, and return its client."""
        known = self.clients[session.client] = self.clients.pop(session.client, _Client())
        if len(self.clients) > _MOST_CLIENTS:
            self.clients.popitem(last=False)
        self.running.add(session)
        return known

    def learnt(self) -> dict[str, Any]:
        """Return what was learnt, as JSON can hold it: of the latest clients."""
        costs = {str(size): (own.level, own.drafting, own.num_compared) for size, own in self.costs.measured.items()}
        latest = list(self.clients.items())[-_MOST_KEPT_CLIENTS:]
        kinds = {
            name: {kind: (each.expected, each.tried, each.passed) for kind, each in own.pools.items()}
            for name, own in latest
        }
        return {"costs": costs, "clients": kinds}

    def restore(self, learnt: dict[str, Any]) -> None:
        """Begin with what was learnt before. Raises ValueError, TypeError or LookupError for other contents."""
        costs = {int(size): Measured(*values) for size, values in learnt["costs"].items()}
        if not all(
            0.05 < own.level < 20 and 0.05 < own.drafting < 20 and own.num_compared >= 0 for own in costs.values()
        ):
            raise ValueError(f"costs of {costs}")
        clients = {
            str(name): _Client({str(kind): PassRates.restored(*counts) for kind, counts in own.items()})
            for name, own in learnt["clients"].items()
        }
        self.costs.measured.update(costs)
        self.clients.update(clients)

    def seconds_per_token(self, num_sessions: int) -> float:
        """Return the seconds of a token in each of this many sessions that run together; 0 before any round.

        Admission asks for many numbers of sessions after each round.
        """
        if (window := self._window) is None or self.costs.target() is None:
            return 0.0
        if num_sessions not in (known := window.seconds_per_token):
            drafting = self.costs.seconds(num_sessions, window.length) / window.tokens
            known[num_sessions] = min(drafting, self.costs.seconds(num_sessions, 0))
        return known[num_sessions]

    def seconds_by_match(self, window: Window) -> list[float]:
        """Return by length the seconds that a session's matched tokens cost, in a round that others share.

        They are those of the round, and what the matched tokens add to it for all sessions.
        """
        if not window.seconds_by_match:
            n = window.num_active
            others = window.length if n > 1 else 0.0
            lengths = range(MAX_NUM_DRAFT_TOKENS + 1)
            seconds = [self.costs.seconds(n, others, max(length - others, 0.0) / n) for length in lengths]
            window.seconds_by_match = [seconds[0] + n * (each - seconds[0]) for each in seconds]
        return window.seconds_by_match

    def window(self) -> Window | None:
        """Return the present window, a new one when the last is over or sessions have come or gone."""
        last = self._window
        if self.costs.target() is None:
            return None
        if last is None or self.running.num_rounds >= last.ends_at or self.running.num_changes != last.num_changes:
            if last is not None and (rounds := last.num_rounds):
                last.seconds = last.measured_seconds / rounds
                n, drafted = last.num_active, last.num_drafted > 0
                self.costs.observe(n, drafted, last.measured_seconds, last.expected_seconds, rounds / n)
            self._window = self._next_window(last)
        return self._window

    def _next_window(self, last: Window | None) -> Window:
        active, now, running = self.running.active(), self.measured_seconds, self.running
        n = max(len(active), 1)
        size = size_class(n)
        tokens, lengths, seconds = self.expected(active)
        rates = [each / time for each, time in zip(tokens, seconds, strict=True)]
        best = max(range(len(rates)), key=rates.__getitem__)
        present = min(self._best_k.get(size, best), len(rates) - 1)
        k = self._best_k[size] = best if rates[best] >= _LEAST_GAIN * rates[present] else present
        if last is None:
            self._trial_at = now + _FIRST_TRIAL_ROUNDS * seconds[0]
        elif last.is_trial and last.num_changes == running.num_changes:  # the same texts
            self._pay_for_trial(rates[min(last.k, len(rates) - 1)] / rates[k], last.seconds)
        if is_trial := now >= self._trial_at:
            self._num_trials += 1
            best, k = k, self._other_k(k, rates)
            self._pay_for_trial(rates[k] / rates[best], seconds[k])
        ends_at = running.num_rounds + n * min(WINDOW_ROUNDS, 1 + self.num_rounds // n)
        return Window(k, lengths[k], tokens[k], seconds[k], n, running.num_changes, ends_at, is_trial)

    def _pay_for_trial(self, part: float, seconds: float) -> None:
        """Delay the next trial, after one with this part of the best speed and such rounds."""
        loss = max(1 - part, _LEAST_LOSS)
        self._trial_at = self.measured_seconds + loss * WINDOW_ROUNDS * seconds / _TRIAL_SHARE

    def expected(self, active: list[SessionPlanner]) -> tuple[list[float], list[float], list[float]]:
        """Return by k the tokens that a session's round emits and proposes, and its seconds, as means over sessions.

        A round with k draft tokens emits 1 and those that are accepted (Leviathan et al., arXiv 2211.17192,
        equation 1, by position).
        """
        may_draft = [each for each in active if each.shared is self and each.may_draft and not each.has_fault]
        most = MAX_NUM_DRAFT_TOKENS if self.costs.draft() and may_draft else 0
        accepted, proposed = [0.0] * most, [0.0] * most
        for each in may_draft:
            own = each.proposals(alone=len(active) == 1)
            for sums, rates in ((accepted, own.accepted), (proposed, own.proposed)):
                for i, survival in enumerate(rates.survival(most)):
                    sums[i] += survival / len(may_draft)
        tokens = [*accumulate(accepted, initial=1.0)]
        lengths = [*accumulate(proposed, initial=0.0)]
        costs = [self.costs.seconds(max(len(active), 1), k) for k in range(most + 1)]
        return tokens, lengths, mean_seconds(costs, proposed)

    def _other_k(self, best: int, rates: list[float]) -> int:
        """Return the k of a trial: each second time none, a control; else a near one that promises most."""
        others = [k for k in range(1, len(rates)) if k != best and (not best or abs(k - best) <= 2)]
        return 0 if not others or (best and self._num_trials % 2) else max(others, key=rates.__getitem__)


class SessionPlanner:
    """Plans the rounds of a session: the k of the window, or looked-up tokens where they promise more."""

    def __init__(
        self,
        shared: Planner,
        client: str,
        sampling: Sampling,
        sources: Sources,
        is_paused: Callable[[], bool],
    ) -> None:
        self.client, self.is_paused, self._sources = client, is_paused, sources
        self._drafts = TokenSource.DRAFT in sources.allowed
        self.may_draft = self._drafts and sources.k is None
        self.has_fault = False  # the draft did not answer in the last round
        self._learns_alone = sampling.changes_logits  # other tokens are likely under a bias
        self._kind = kind_of(sampling)
        self._join(shared)

    def _join(self, shared: Planner) -> None:
        self.shared = shared
        self.is_prefilling = True
        self.planned_at = shared.running.num_rounds  # the number of rounds of all sessions when it last planned
        client = shared.join(self)
        self._paces, self._pools = client.paces, {} if self._learns_alone else client.pools
        self._own: dict[bool, Proposals] = {}
        self._of_match: PassRates | None = None
        self._window: Window | None = None
        self._is_settled = False  # whether the sessions had this k in the round before, too

    def move(self, shared: Planner) -> None:
        """Continue with the planner of another target, in the middle of a round."""
        self.close()
        self._join(shared)

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
        self.planned_at = self.shared.running.num_rounds
        before, self._window = self._window, self.shared.window()
        window, k = self._window, self._sources.k
        self._is_settled = before is not None and window is not None and before.k == window.k
        if k is not None:
            return Plan(dict.fromkeys(self._sources.allowed, k), most=k)
        if window is not None and matches and (plan := self._plan_match(window, matches)):
            return plan
        if self.may_draft and self.shared.costs.draft() is None:
            return Plan({TokenSource.DRAFT: 1})  # the Drafter reports why there is no draft
        plan = self._plan_draft()
        return self._lengthened(plan, window, matches) if window is not None and plan.limits and matches else plan

    def ahead(self) -> Plan:
        """Return how many draft tokens the next round is likely to have, for a target that proposes them ahead."""
        if self._sources.k is not None:
            return Plan({TokenSource.DRAFT: self._sources.k} if self._drafts else {})
        return self._plan_draft()

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
        drafted, verdict, window = round_.proposal.drafted, round_.verdict, self._window
        self.has_fault, num_drafted = bool(drafted.fault), len(drafted.token_ids)
        if window is None or self.has_fault:
            return 0.0
        num_new = max(drafted.exchange.num_tokens, verdict.exchange.num_tokens)
        is_typical = (
            num_new <= MOST_NEW_TOKENS
            and not verdict.was_retried
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
        """Return a plan with the matched tokens that promise more than a proposal of the draft; in a trial, any two.

        They cost only their verification, in a step that is shared with the other sessions' tokens. A round is worth
        its tokens less those that a session emits elsewhere in its time (Dinkelbach, 1967: what maximises a ratio).
        """
        rate, seconds = self._tokens_per_second(window), self.shared.seconds_by_match(window)
        least_gain = 1.0 if window.is_trial else _LEAST_GAIN
        plan, best = None, least_gain * window.tokens - rate * window.seconds
        for match in matches:
            rates = self._rates(f"match {match.evidence}", _FIRST_ACCEPTANCE)
            rates.expected = self._of_matches().mean()
            rates.forget()
            most = min(len(match.token_ids), MAX_NUM_DRAFT_TOKENS)
            if window.is_trial and plan is None:
                plan, self._of_match = Plan({match.source: min(2, most)}), rates
            length, worth = _best_length(rates, rate, seconds[: most + 1])
            worth += 1 - rate * seconds[0]
            if length and worth > best:
                plan, best, self._of_match = Plan({match.source: length}), worth, rates
        return plan

    def _lengthened(self, plan: Plan, window: Window, matches: Sequence[Match]) -> Plan:
        """Return the plan with matched tokens behind the draft's, as many as promise more tokens than their time costs.

        They are those of the first match. Look-up proposes them only if its match begins with the draft's tokens.
        """
        source, evidence = matches[0].source, matches[0].evidence
        rates = self._of_match = self._rates(f"agreed {evidence}", _FIRST_ACCEPTANCE)
        rates.forget()
        seconds = self.shared.seconds_by_match(window)[round(window.length) :]
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
