"""What distinguishes the contenders of a benchmark from each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specd.sampling import Acceptance

SPECD, MLX_LM = "specd", "mlx-lm"


@dataclass(frozen=True)
class Setup:
    """Who decodes, and how; without draft tokens the target alone."""

    system: str
    num_draft_tokens: int = 0
    temperature: float = 0.0
    acceptance: Acceptance = Acceptance.COUPLED
    lenience: float = 0.0

    @property
    def label(self) -> str:
        """How a table for one temperature calls it."""
        if not self.num_draft_tokens:
            return f"{self.system}, target alone"
        method = f", lenience {self.lenience:g}" if self.lenience else ", rejection"
        return f"{self.system}, k = {self.num_draft_tokens}" + (method if self.rejects else "")

    @property
    def name(self) -> str:
        """How it is called among all."""
        return f"{self.label}, T = {self.temperature:g}" if self.temperature else self.label

    @property
    def rejects(self) -> bool:
        """Whether it is specd that accepts by REJECTION."""
        return self.acceptance is Acceptance.REJECTION

    @property
    def repeats_target(self) -> bool:
        """Whether it must give the tokens of specd's target alone with the same seed."""
        if self.temperature == 0:
            return self.lenience == 0
        return self.system == SPECD and not self.rejects

    @property
    def is_faithful(self) -> bool:
        """Whether its texts are samples of the target's own distribution."""
        return self.lenience == 0


def setups(
    temperature: float, num_draft_tokens: Sequence[int], acceptance: Sequence[Acceptance], lenience: Sequence[float]
) -> Iterator[Setup]:
    """Give the contenders for a temperature, specd with the target alone first."""
    yield Setup(SPECD, 0, temperature)
    for k in num_draft_tokens:
        for method in acceptance:
            for added in lenience if method is Acceptance.REJECTION else [0.0]:
                yield Setup(SPECD, k, temperature, method, added)
    for k in (0, *num_draft_tokens):
        yield Setup(MLX_LM, k, temperature)
