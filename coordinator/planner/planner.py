"""The planner: how many tokens each round of each session proposes, and by whom."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from coordinator.planner.acceptance import PassRates, mean_seconds
from coordinator.planner.round_costs import Measured, RoundCosts, size_class
from coordinator.planner.running import Running, RunningSession
from coordinator.planner.window import LEAST_GAIN, WINDOW_ROUNDS, Window
from specd.setting_types import MAX_NUM_DRAFT_TOKENS
from specd.step_costs import MovingAverage

_FIRST_TRIAL_ROUNDS = 10
_LEAST_LOSS = 0.1  # part of the time of a trial that it is taken to cost, as looked-up tokens are tried, too
_TRIAL_SHARE = 0.01  # of the time, which trials of another k may cost
_MOST_CLIENTS, _MOST_KEPT_CLIENTS = 128, 16


@dataclass
class ClientHistory:
    """A client, by its sessions: how far proposals get, by kind, and how fast its latest rounds were.

    `paces` has the tokens and the seconds of a round, by class of numbers of sessions.
    """

    pools: dict[str, PassRates] = field(default_factory=dict)
    paces: dict[int, tuple[MovingAverage, MovingAverage]] = field(default_factory=dict)


class Planner:
    """What the sessions of a draft share: the costs of rounds, what each client has taught, and the present window."""

    def __init__(self, costs: RoundCosts, running: Running | None = None) -> None:
        """Plan for those of the `running` sessions that join here; the others share the target with them."""
        self.costs = costs
        self.running = running or Running()
        self.num_rounds = self._num_trials = 0
        # Trials may cost a part of this time: idle time, prefills and faults neither pay for a trial nor prolong it.
        self.measured_seconds = 0.0
        # What one client teaches must neither mislead others nor tell them anything (vllm-project/vllm#57533).
        self.clients: OrderedDict[str, ClientHistory] = OrderedDict()
        self._best_k: dict[int, int] = {}  # by class of numbers of sessions
        self._window: Window | None = None
        self._trial_at = 0.0

    def join(self, session: RunningSession) -> ClientHistory:
        """Count a session, and return its client."""
        known = self.clients[session.client] = self.clients.pop(session.client, ClientHistory())
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
            str(name): ClientHistory({str(kind): PassRates.restored(*counts) for kind, counts in own.items()})
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

    def seconds_by_match(self, window: Window, num_claimed: int = 0) -> list[float]:
        """Return by length the seconds that a session's matched tokens cost, in a round that others share.

        They are those of the round, and what the matched tokens add to it for all sessions. Kernels compute rows in
        blocks, and a row that is computed anyway serves one session. So the matched tokens of this session come after
        `num_claimed` matched tokens that others have planned for the same step.
        """
        n, most = window.num_active, MAX_NUM_DRAFT_TOKENS
        if not window.seconds_by_rows:
            drafted = window.length if n > 1 else 0.0
            window.seconds_by_rows = [self.costs.seconds(n, drafted, rows / n) for rows in range(2 * most + 1)]
        seconds, first = window.seconds_by_rows, min(num_claimed, most)
        rows = (first + max(length - window.num_replaced, 0) for length in range(most + 1))
        return [seconds[0] + n * (seconds[each] - seconds[first]) for each in rows]

    def window(self) -> Window | None:
        """Return the present window, a new one when the last is over."""
        last = self._window
        if self.costs.target() is None:
            return None
        if last is None or self.running.is_over(last):
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
        k = self._best_k[size] = best if rates[best] >= LEAST_GAIN * rates[present] else present
        if last is None:
            self._trial_at = now + _FIRST_TRIAL_ROUNDS * seconds[0]
        elif last.is_trial and running.are_those_of(last):  # the same texts
            self._pay_for_trial(rates[min(last.k, len(rates) - 1)] / rates[k], last.seconds)
        if is_trial := now >= self._trial_at:
            self._num_trials += 1
            best, k = k, self._other_k(k, rates)
            self._pay_for_trial(rates[k] / rates[best], seconds[k])
        ends_at = running.num_rounds + n * min(WINDOW_ROUNDS, 1 + self.num_rounds // n)
        return Window(
            k,
            length=lengths[k],
            tokens=tokens[k],
            seconds=seconds[k],
            num_active=n,
            num_begun=running.num_begun,
            num_ended=running.num_ended,
            ends_at=ends_at,
            is_trial=is_trial,
        )

    def _pay_for_trial(self, part: float, seconds: float) -> None:
        """Delay the next trial, after one with this part of the best speed and such rounds."""
        loss = max(1 - part, _LEAST_LOSS)
        self._trial_at = self.measured_seconds + loss * WINDOW_ROUNDS * seconds / _TRIAL_SHARE

    def expected(self, active: list[RunningSession]) -> tuple[list[float], list[float], list[float]]:
        """Return by k the tokens that a session's round emits and proposes, and its seconds, as means over sessions.

        A round with k draft tokens emits 1 and those that are accepted (Leviathan et al., arXiv 2211.17192,
        equation 1, by position).
        """
        may_draft = [each for each in active if each.drafts_with(self)]
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
