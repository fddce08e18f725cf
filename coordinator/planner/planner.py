"""The planner: how many tokens to draft in each round of each session."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from coordinator.core import Plan, Round
from coordinator.planner.acceptance import PooledAcceptance, SessionAcceptance
from coordinator.planner.cost_model import CostModel
from coordinator.planner.policy import RoundCosts, choose_k, share_out, stop_thresholds
from specd.sampling import Sampling

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
# Drafting that does not pay is probed with this many tokens, once the last probe cost less than this part of the time.
_PROBE_DRAFT_TOKENS = 2
_PROBE_SHARE = 0.0025


@dataclass(eq=False)
class _Window:
    """Some rounds of all sessions: their costs, and the k of each session."""

    costs: RoundCosts
    num_active: int
    ends_at: int
    ks: dict[Hashable, int] = field(default_factory=dict)


class Planner:
    """What all sessions share: the cost model, the pooled acceptance, and the window of rounds they plan for."""

    def __init__(self, cost_model: CostModel, *, clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self.cost_model = cost_model
        self.num_rounds = 0
        self._clock = clock
        self._pools: dict[object, PooledAcceptance] = {}
        self.sessions: dict[SessionPlanner, None] = {}
        self._window: _Window | None = None
        self._probe_at = clock()

    def begin(self, sampling: Sampling, num_draft_tokens: int | None = None) -> SessionPlanner:
        """Begin to plan for a session; with `num_draft_tokens`, that is its k. It counts until it is closed."""
        # Acceptance depends on the temperature more than on the text.
        pool = self._pools.setdefault((sampling.acceptance, round(sampling.temperature, 1)), PooledAcceptance())
        session = SessionPlanner(
            self, SessionAcceptance(pool, teaches=not sampling.changes_logits), pool, num_draft_tokens
        )
        self.sessions[session] = None
        return session

    def active(self) -> list[SessionPlanner]:
        """Return the sessions that take part in rounds now."""
        oldest = self.num_rounds - _WINDOW_ROUNDS * len(self.sessions)
        return [session for session in self.sessions if session.planned_at >= oldest]

    def window(self) -> _Window | None:
        """Return the current window, a new one when the last is over or the batch has changed; None without a draft."""
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
            adaptive = [each for each in self.active() if each.is_adaptive and not each.has_fault]
            gain = _GAIN_TO_GO_ON if any(each.k for each in adaptive) else _GAIN_TO_START
            window.ks = share_out({each: each.acceptance.accepted() for each in adaptive}, window.costs, gain)
        return window.ks.get(session, _PROBE_DRAFT_TOKENS)  # after a fault, the Drafter knows when to ask again

    @property
    def is_probe_due(self) -> bool:
        """Whether drafting that does not pay is to be tried again."""
        return self._clock() >= self._probe_at

    def probed(self, cost_seconds: float) -> None:
        """Count a probe: the more it cost, the later is the next."""
        self._probe_at = self._clock() + max(cost_seconds, 0.0) / _PROBE_SHARE


class SessionPlanner:
    """Plans the rounds of a session: on its own the best k, with proposals that end early; else its part of a batch."""

    def __init__(
        self, shared: Planner, acceptance: SessionAcceptance, pool: PooledAcceptance, fixed_k: int | None
    ) -> None:
        self.acceptance = acceptance
        self.k = 0
        self.planned_at = shared.num_rounds  # the number of rounds of all sessions when it last planned
        self._shared = shared
        self._pool = pool
        self._fixed_k = fixed_k
        self.is_adaptive = fixed_k is None
        self._window: _Window | None = None
        self._min_confidences: list[float] = []
        self._is_probe = False
        self.has_fault = False  # the draft did not answer in the last round

    def close(self) -> None:
        """End with the session."""
        self._shared.sessions.pop(self, None)
        self.acceptance.close()

    def will_draft(self) -> bool:
        """Return whether the draft is likely to be asked soon, so that it should have the prompt."""
        self._choose()
        return self.k > 0 or (self.is_adaptive and self._shared.is_probe_due)

    def plan(self) -> Plan:
        """Plan the next round."""
        self.planned_at = self._shared.num_rounds
        self._choose()
        self._is_probe = self.k == 0 and self.is_adaptive and (self._window is None or self._shared.is_probe_due)
        if self._is_probe:  # without a window there is no draft, and the Drafter says why
            return Plan(_PROBE_DRAFT_TOKENS)
        is_single = self._window is not None and self._window.num_active == 1
        number = self._shared.num_rounds + 1
        is_control_due = number >= _WINDOW_ROUNDS and (number % _CONTROL_ROUNDS == 0 or number.bit_count() == 1)
        if self.is_adaptive and is_single and is_control_due:
            return Plan(0)
        return Plan(self.k, self._min_confidences)

    def observe(self, plan: Plan, round_: Round) -> float:
        """Learn from a round after the first; return the target-only seconds for its tokens, 0 if not known."""
        self._shared.num_rounds += 1
        self.has_fault = bool(round_.proposal.fault)
        if self._window is None:
            return 0.0
        self._shared.cost_model.observe(round_, self._window.num_active)
        target_only_seconds = len(round_.commit.token_ids) * self._window.costs.target_only
        if self.is_adaptive and round_.num_proposed:
            # The target's own count: a text that ends rejects nothing.
            proposal, num_accepted = round_.proposal, round_.verdict.num_accepted
            self.acceptance.add(plan.num_draft_tokens, proposal.confidences, round_.num_proposed, num_accepted)
            if self._is_probe:
                self._shared.probed(round_.seconds - target_only_seconds)
        return 0.0 if self.has_fault else target_only_seconds

    def _choose(self) -> None:
        """Set k and the stop thresholds for the current window."""
        before, self._window = self._window, self._shared.window()
        window = self._window
        if self._fixed_k is not None:
            self.k = self._fixed_k
        elif window is None:
            self.k = 0
        elif window.num_active > 1:
            self.k, self._min_confidences = self._shared.shared_k(self, window), []
        elif window is not before:
            accepted = [a * c for a, c in zip(self.acceptance.accepted(), self._pool.continued.survival(), strict=True)]
            gain = _GAIN_TO_GO_ON if self.k else _GAIN_TO_START
            self.k, rate = choose_k(accepted, self._pool.reached.survival(), window.costs, gain)
            thresholds = stop_thresholds(window.costs, rate, accepted[0], self.k)
            self._min_confidences = [self._pool.confidence(threshold) for threshold in thresholds]
