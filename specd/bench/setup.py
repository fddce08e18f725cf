"""Setups of the contenders of a benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specd.sampling import Acceptance

SPECD, MLX_LM = "specd", "mlx-lm"


@dataclass(frozen=True)
class Setup:
    """System and parameters of a contender. With 0 draft tokens the target decodes alone; with None, k is adaptive."""

    system: str
    num_draft_tokens: int | None = 0
    temperature: float = 0.0
    acceptance: Acceptance = Acceptance.COUPLED
    lenience: float = 0.0

    @property
    def label(self) -> str:
        """Name in a table for one temperature."""
        return f"{self.system}, {self.draft_label}{self.method}" if self.speculates else f"{self.system}, target alone"

    @property
    def draft_label(self) -> str:
        """Draft tokens per round, in words."""
        return "adaptive" if self.is_adaptive else f"k = {self.num_draft_tokens}"

    @property
    def method(self) -> str:
        """Suffix of a name for the acceptance rule; empty for COUPLED."""
        if not self.rejects:
            return ""
        return f", lenience {self.lenience:g}" if self.lenience else ", rejection"

    @property
    def name(self) -> str:
        """Name among all contenders."""
        return f"{self.label}, T = {self.temperature:g}" if self.temperature else self.label

    @property
    def speculates(self) -> bool:
        """Whether a draft takes part."""
        return self.num_draft_tokens != 0

    @property
    def is_adaptive(self) -> bool:
        """Whether the service chooses how many draft tokens each round has."""
        return self.num_draft_tokens is None

    @property
    def rejects(self) -> bool:
        """Whether this is specd with acceptance by REJECTION."""
        return self.acceptance is Acceptance.REJECTION

    @property
    def repeats_target(self) -> bool:
        """Whether its tokens must equal the tokens of specd's target alone with the same seed."""
        if self.temperature == 0:
            return self.lenience == 0
        return self.system == SPECD and not self.rejects

    @property
    def is_faithful(self) -> bool:
        """Whether its texts are samples of the target's own distribution."""
        return self.lenience == 0


def setups(
    temperature: float,
    num_draft_tokens: Sequence[int],
    acceptance: Sequence[Acceptance],
    lenience: Sequence[float],
    *,
    adaptive: bool = False,
) -> Iterator[Setup]:
    """Yield the setups for a temperature, specd with the target alone first; mlx-lm has fixed k only."""
    yield Setup(SPECD, 0, temperature)
    for k in (*num_draft_tokens, None) if adaptive else num_draft_tokens:
        for method in acceptance:
            for added in lenience if method is Acceptance.REJECTION else [0.0]:
                yield Setup(SPECD, k, temperature, method, added)
    for k in (0, *num_draft_tokens):
        yield Setup(MLX_LM, k, temperature)
