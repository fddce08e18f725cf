"""Simulated trials of a draft, with a known acceptance and known costs of both."""

from __future__ import annotations

import random
from dataclasses import dataclass

from coordinator.canary.judgement import ROUNDS_OF_A_SESSION, CanaryState, Judgement
from specd.step_costs import StepCosts

TARGET = StepCosts({1: {1: 0.020, 9: 0.026, 33: 0.050}})


@dataclass(frozen=True)
class SimulatedDraft:
    """A draft. The probability that its tokens are accepted has this mean and this spread over texts."""

    acceptance: float = 0.7
    spread: float = 0.1
    seconds: float = 0.0016  # of a token
    slowness: float = 1.0  # of a measured proposal, relative to calibration

    @property
    def costs(self) -> StepCosts:
        """The calibrated costs of its worker."""
        return StepCosts({1: {k: k * self.seconds for k in (1, 2, 4, 8)}})

    def probability(self, rng: random.Random) -> float:
        """Return the acceptance of a text."""
        mean = self.acceptance
        if not self.spread:
            return mean
        strength = mean * (1 - mean) / self.spread**2 - 1
        return rng.betavariate(mean * strength, (1 - mean) * strength)


@dataclass(frozen=True)
class Decision:
    """The end of a trial."""

    state: CanaryState
    num_rounds: int


def run_trial(
    present: SimulatedDraft, canary: SimulatedDraft, *, seed: int, rounds: int = 15, share: int = 10, k: int = 6
) -> Decision:
    """Run sessions of some rounds each, every `share`-th with the canary, until it is decided."""
    rng, judgement = random.Random(seed), Judgement()
    costs = present.costs, canary.costs
    number = 0
    while True:
        number += 1
        is_canary = number % share == 0
        draft = canary if is_canary else present
        probability = draft.probability(rng)
        evidence = judgement.begin("greedy", is_canary=is_canary)
        for _ in range(min(rounds, ROUNDS_OF_A_SESSION)):
            accepted = next((i for i in range(k) if rng.random() >= probability), k)
            evidence.add(k, k, accepted)
            expected = costs[is_canary].seconds(1, k)
            evidence.expected_seconds += expected
            evidence.seconds += draft.slowness * expected * rng.uniform(0.8, 1.2)
            judgement.add_step(1, TARGET.seconds(1, k + 1), TARGET.seconds(1, k + 1))
            if is_canary and judgement.add_rounds(1):
                state = judgement.decide(judgement.compare(TARGET, *costs))
                if state is not CanaryState.UNDECIDED:
                    return Decision(state, judgement.num_rounds)
