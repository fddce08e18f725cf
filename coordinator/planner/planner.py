"""The planner: how many tokens each round of each session proposes, and by whom."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from coordinator.core import Match, Plan, Round
from coordinator.planner.acceptance import SessionAcceptance
from coordinator.planner.cost_model import CostModel
from coordinator.planner.learning import ClientLearning, Learning, Probes
from coordinator.planner.policy import RoundCosts, choose_k, choose_matched, share_out, stop_thresholds
from coordinator.planner.speed import Speed
from coordinator.sources import Sources
from specd.sampling import Sampling
from specd.vocabulary import TokenSource

# A plan holds for a window of this many rounds of each session. Sessions that change k at any time do not stay in one
# batch. A session without a round for this many rounds of each session does not count as active: its client has
# stalled, or it prefills.
_WINDOW_ROUNDS = 8
# A control round, the target's alone, is due at round 8, 16, 32, 64, and then every so many rounds.
_CONTROL_ROUNDS = 64
# Predicted gain over the target alone at which a session starts to draft, and at which it goes on. A start costs the
# draft's prefill, and predictions err.
_GAIN_TO_START = 1.06
_GAIN_TO_GO_ON = 1.02
_PROBE_DRAFT_TOKENS = 2
_ALL_SOURCES = Sources()


@dataclass(eq=False)
class _Window:
    """Some rounds of all sessions: their costs, and the k of each session."""

    costs: RoundCosts
    num_active: int
    ends_at: int
    ks: dict[Hashable, int] = field(default_factory=dict)

    @property
    def has_draft(self) -> bool:
        """Whether there is a draft model."""
        return bool(self.costs.draft)

    def seconds(self, k: int) -> float:
        """Return what a round with k draft tokens takes."""
        costs = self.costs
        drafting = costs.draft_overhead + costs.draft[k] + costs.draft_wait if k else 0.0
        return costs.round_overhead + drafting + costs.verify[k]


class Planner:
    """What all sessions share: the cost model, what each client has taught, and the window of rounds they plan for."""

    def __init__(self, cost_model: CostModel, *, clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self.cost_model = cost_model
        self.speed = Speed()
        self.num_rounds = 0
        self._learning = Learning(clock)
        self.sessions: dict[SessionPlanner, None] = {}
        self._window: _Window | None = None

    def begin(
        self,
        sampling: Sampling,
        sources: Sources = _ALL_SOURCES,
        *,
        client: str,
        is_paused: Callable[[], bool] = lambda: False,
    ) -> SessionPlanner:
        """Begin to plan for a client's session with these sources. It counts until it is closed, unless `is_paused`."""
        session = SessionPlanner(self, self._learning.of(client), sampling, sources, is_paused)
        self.sessions[session] = None
        return session

    def active(self) -> list[SessionPlanner]:
        """Return the sessions that take part in rounds now."""
        oldest = self.num_rounds - _WINDOW_ROUNDS * len(self.sessions)
        return [session for session in self.sessions if session.planned_at >= oldest and not session.is_paused()]

    def window(self) -> _Window | None:
        """Return the current window, a new one when the last is over or the batch has changed."""
        num_active = max(len(self.active()), 1)
        last = self._window
        if last is None or self.num_rounds >= last.ends_at or num_active != last.num_active:
            costs = self.cost_model.costs(num_active)
            ends_at = self.num_rounds + _WINDOW_ROUNDS * num_active
            self._window = None if costs is None else _Window(costs, num_active, ends_at)
        return self._window

    def shared_k(self, session: SessionPlanner, window: _Window) -> int:
        """Return the k of one of several sessions in this window."""
        if session not in window.ks and not session.has_fault:  # the window or the session is new
            active = self.active()
            adaptive = [each for each in active if each.may_draft and not each.has_fault]
            gain = _GAIN_TO_GO_ON if any(each.k for each in adaptive) else _GAIN_TO_START
            gain *= 1 + sum(each.learning.match_gain.value for each in active)  # drafting must win against matches
            window.ks = share_out({each: each.acceptance.accepted() for each in adaptive}, window.costs, gain)
        return window.ks.get(session, _PROBE_DRAFT_TOKENS)  # after a fault, the Drafter knows when to ask again


class SessionPlanner:
    """Plans the rounds of a session: on its own the best k, with proposals that end early; else its part of a batch.

    Matches replace the draft model's tokens where they promise more, or lengthen a proposal.
    """

    def __init__(
        self,
        shared: Planner,
        learning: ClientLearning,
        sampling: Sampling,
        sources: Sources,
        is_paused: Callable[[], bool],
    ) -> None:
        self.k = 0
        self.planned_at = shared.num_rounds  # the number of rounds of all sessions when it last planned
        self.is_paused = is_paused
        self.has_fault = False  # the draft did not answer in the last round
        self.may_draft = sources.k is None and TokenSource.DRAFT in sources.allowed
        self.learning = learning
        self._shared = shared
        self._sampling = sampling
        self._pool = learning.pool(sampling)
        self.acceptance = SessionAcceptance(self._pool, teaches=not sampling.changes_logits)
        self._of_matches: dict[object, SessionAcceptance] = {}
        self._sources = sources
        self._window: _Window | None = None
        self._min_confidences: list[float] = []
        self._rate = 0.0  # expected tokens per second with k
        self._evidence: object = None
        self._probing: Probes | None = None

    def close(self) -> None:
        """End with the session."""
        self._shared.sessions.pop(self, None)
        for acceptance in (self.acceptance, *self._of_matches.values()):
            acceptance.close()

    def will_draft(self) -> bool:
        """Return whether the draft is likely to be asked soon, so that it should have the prompt."""
        self._choose()
        return self.k > 0 or (self.may_draft and self.learning.probes.is_due)

    def plan(self, matches: Sequence[Match] = ()) -> Plan:
        """Plan the next round, for which sources have these matches."""
        self.planned_at = self._shared.num_rounds
        self._choose()
        self._probing = None
        if (k := self._sources.k) is not None:
            return Plan(dict.fromkeys(self._sources.allowed, k), most=k)
        window = self._window
        number = self._shared.num_rounds + 1
        is_control_due = number >= _WINDOW_ROUNDS and (number % _CONTROL_ROUNDS == 0 or number.bit_count() == 1)
        if window is not None and window.num_active == 1 and is_control_due:
            return Plan()
        if window is not None and (plan := self._plan_matches(window, matches)):
            return plan
        if self.may_draft and self.k == 0 and (window is None or not window.has_draft or self.learning.probes.is_due):
            self._probing = self.learning.probes  # without a draft, the Drafter says why
            return _drafting(_PROBE_DRAFT_TOKENS)
        return _drafting(self.k, self._min_confidences)

    def observe(self, plan: Plan, round_: Round) -> float:
        """Learn from a round after the first; return the target-only seconds for its tokens, 0 if not known."""
        self._shared.num_rounds += 1
        drafted = round_.proposal.drafted
        self.has_fault = bool(drafted.fault)
        if self._window is None:
            return 0.0
        self._shared.cost_model.observe(round_, self._window.num_active)
        num_tokens = len(round_.commit.token_ids)
        target_only_seconds = num_tokens * self._window.costs.target_only
        if not round_.verdict.was_retried and not self.has_fault:
            self._shared.speed.add(self._window.num_active, round_.seconds, num_tokens)
        if self._sources.k is None and round_.num_proposed:
            left = round_.verdict.num_accepted  # the target's own count: a text that ends rejects nothing
            for part in round_.proposal.parts:
                num_tokens = len(part.token_ids)
                if not num_tokens:
                    continue
                if part is drafted:
                    limit = plan.limit(part.source)
                    self.acceptance.add(limit, part.confidences, num_tokens, min(left, num_tokens))
                else:
                    self._acceptance_of(self._evidence).add(num_tokens, (), num_tokens, min(left, num_tokens))
                if left < num_tokens:
                    break
                left -= num_tokens
            if self._probing is not None:
                self._probing.probed(round_.seconds - target_only_seconds)
        return 0.0 if self.has_fault else target_only_seconds

    def _choose(self) -> None:
        """Set k and the stop thresholds for the current window."""
        before, self._window = self._window, self._shared.window()
        window = self._window
        if self._sources.k is not None:
            self.k = self._sources.k if TokenSource.DRAFT in self._sources.allowed else 0
        elif window is None or not window.has_draft or not self.may_draft:
            self.k, self._min_confidences, self._rate = 0, [], 0.0
        elif window.num_active > 1:
            self.k, self._min_confidences = self._shared.shared_k(self, window), []
            self._rate = (1 + sum(self.acceptance.accepted()[: self.k])) / window.seconds(self.k)
        elif window is not before:
            accepted = [a * c for a, c in zip(self.acceptance.accepted(), self._pool.continued.survival(), strict=True)]
            gain = _GAIN_TO_GO_ON if self.k else _GAIN_TO_START
            self.k, self._rate = choose_k(accepted, self._pool.reached.survival(), window.costs, gain)
            thresholds = stop_thresholds(window.costs, self._rate, accepted[0], self.k)
            self._min_confidences = [self._pool.confidence(threshold) for threshold in thresholds]

    def _plan_matches(self, window: _Window, matches: Sequence[Match]) -> Plan | None:
        """Return a plan with matched tokens, alone or behind the draft's, if they promise more than none."""
        costs, n = window.costs, window.num_active
        if not matches:
            self.learning.match_gain.add(0.0)
            return None
        promises = [(match, self._accepted(match)) for match in matches]
        match, accepted = max(promises, key=lambda promise: choose_matched(promise[1], costs, n)[1])
        self._evidence = match.evidence
        length, rate = choose_matched(accepted, costs, n)
        self.learning.match_gain.add(rate * costs.target_only - 1)
        if n > 1 and self.k:  # the others draft, and the round takes as long
            seconds = window.seconds(self.k)
            length, rate = choose_matched(accepted, costs, n, after=(0, 1 + (n - 1) * self._rate * seconds, seconds))
        if length and rate > max(self._rate, _GAIN_TO_GO_ON / costs.target_only):
            return Plan({match.source: length})
        if self.k == 0:
            if not self.learning.match_probes.is_due:
                return None
            self._probing = self.learning.match_probes
            return Plan({match.source: _PROBE_DRAFT_TOKENS})
        self._evidence = (True, *match.evidence)  # that the model says the same makes it likelier
        accepted = self._acceptance_of(self._evidence).accepted()[: len(match.token_ids) - self.k]
        tokens = n * self._rate * window.seconds(self.k)
        length, _ = choose_matched(accepted, costs, n, after=(self.k, tokens, window.seconds(self.k)))
        return Plan({TokenSource.DRAFT: self.k, match.source: length}, self._min_confidences, self.k + length)

    def _accepted(self, match: Match) -> list[float]:
        return self._acceptance_of(match.evidence).accepted()[: len(match.token_ids)]

    def _acceptance_of(self, evidence: object) -> SessionAcceptance:
        if evidence not in self._of_matches:
            pool = self.learning.pool(self._sampling, evidence)
            self._of_matches[evidence] = SessionAcceptance(pool, teaches=not self._sampling.changes_logits)
        return self._of_matches[evidence]


def _drafting(k: int, min_confidences: Sequence[float] = ()) -> Plan:
    return Plan({TokenSource.DRAFT: k} if k else {}, min_confidences if k else ())
