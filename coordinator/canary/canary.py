"""A second draft on trial, and the sessions that it serves."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import structlog

from coordinator.canary.judgement import CanaryState, Judgement
from coordinator.proposals.drafter import DraftStream
from coordinator.proposals.drafts import Drafts
from coordinator.workers.workers import Workers
from specd.step_costs import StepCosts

log = structlog.get_logger()


class Canary:
    """The present drafts and the canary, which serves a share of the sessions until it is known which are faster.

    Then it is kept, and serves all sessions, or taken back. Where the wanted draft is away, the other one proposes, but
    never one that was taken back.
    """

    def __init__(self, present: Workers[DraftStream], canary: Workers[DraftStream], share: float) -> None:
        """`share` is the part of the sessions that begin with the canary, 0 < share <= 0.5."""
        self.drafts = Drafts(present), Drafts(canary)  # by whether they are the canary
        self.state = CanaryState.UNDECIDED
        self.judgement = Judgement()
        self.on_taken_back: Callable[[], None] = lambda: None
        self._share = share
        self._random = Random(0)
        self._num_sessions = self._num_canary = 0
        self._turn = self._random.random() / share

    def has_state(self, state: CanaryState) -> bool:
        """Return whether this became of the canary."""
        return self.state is state

    @property
    def leads(self) -> bool:
        """Whether the canary serves most sessions."""
        return self.is_used(wanted=self.state is CanaryState.KEPT)

    def is_used(self, *, wanted: bool) -> bool:
        """Return whether the canary proposes where it is `wanted` or not: the other draft does if that one is away."""
        if self.state is CanaryState.TAKEN_BACK:
            return False
        own, other = (self.drafts[each].workers.model for each in (wanted, not wanted))
        return wanted if own is not None or other is None else not wanted

    @property
    def is_on_trial(self) -> bool:
        """Whether sessions that begin now are compared."""
        return self.state is CanaryState.UNDECIDED and all(each.workers.model for each in self.drafts)

    def assign(self) -> bool:
        """Return whether the next session begins with the canary.

        Each 1/share sessions have one, at a place that no rhythm of requests can meet: if clients took turns, every
        tenth session would be always the same client's.
        """
        has_canary = self._num_sessions >= self._turn
        self._num_sessions += 1
        if has_canary:
            self._num_canary += 1
            self._turn = (self._num_canary + self._random.random()) / self._share
        return has_canary

    def count_rounds(self, number: int, target: StepCosts | None) -> None:
        """Count rounds of the canary at a target with these costs, and decide when it is time."""
        if self.state is not CanaryState.UNDECIDED or not self.judgement.add_rounds(number):
            return
        present, canary = (each.workers.first for each in self.drafts)
        comparison = self.judgement.compare(target, present.step_costs, canary.step_costs)
        self.state = self.judgement.decide(comparison)
        if self.state is CanaryState.UNDECIDED:
            return
        speeds = (comparison.present, comparison.canary) if comparison is not None else (None, None)
        log.info(
            f"the canary draft is {self.state.value}",
            rounds=self.judgement.num_rounds,
            **{
                f"{name}_{what}": value
                for name, worker, speed in zip(("present", "canary"), (present, canary), speeds, strict=True)
                for what, value in (
                    ("model", worker.model.name if worker.model is not None else None),
                    ("tokens_per_second", speed and round(speed, 1)),
                )
            },
        )
        if self.state is CanaryState.TAKEN_BACK:
            self.on_taken_back()
