"""One measured decode, and what several come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import median


@dataclass(frozen=True)
class Round:
    """Where the time of one round went, in seconds."""

    draft_seconds: float
    verify_seconds: float
    queue_seconds: float
    wire_seconds: float
    coordinator_seconds: float


@dataclass(frozen=True)
class Sample:
    """One decode of one prompt."""

    prompt: str
    repeat: int
    token_ids: tuple[int, ...]
    time_to_first_token_seconds: float
    decode_seconds: float
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    rounds: tuple[Round, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first over the time from the first to the last; 0 when there is only one."""
        return (len(self.token_ids) - 1) / self.decode_seconds if len(self.token_ids) > 1 else 0.0

    def as_record(self) -> dict[str, object]:
        """Return what is worth keeping, with counts in place of tokens and rounds."""
        record = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**record, "token_ids": len(self.token_ids), "rounds": len(self.rounds)}


@dataclass(frozen=True)
class Result:
    """The medians of a contender's samples."""

    name: str
    tokens_per_second: float
    speedup: float
    time_to_first_token_seconds: float
    acceptance_rate: float | None
    acceptance_length: float | None
    round_milliseconds: dict[str, float]


def summarise(name: str, samples: Sequence[Sample], baseline: Sequence[Sample]) -> Result:
    """Take the medians; the speed-up is the median over prompts and repeats of the ratio to the baseline's sample."""
    pairs = zip(samples, baseline, strict=True)
    rounds = [round_ for sample in samples for round_ in sample.rounds]
    proposed = sum(sample.proposed_tokens for sample in samples)
    decoded = sum(len(sample.token_ids) - 1 for sample in samples)
    return Result(
        name=name,
        tokens_per_second=median(sample.tokens_per_second for sample in samples),
        speedup=median(
            own.tokens_per_second / other.tokens_per_second for own, other in pairs if other.tokens_per_second
        ),
        time_to_first_token_seconds=median(sample.time_to_first_token_seconds for sample in samples),
        acceptance_rate=sum(sample.accepted_tokens for sample in samples) / proposed if proposed else None,
        acceptance_length=decoded / len(rounds) if rounds else None,
        round_milliseconds=_medians(rounds),
    )


def _medians(rounds: Sequence[Round]) -> dict[str, float]:
    """Take the median of each stage, and of what coordinator and wire take together."""
    if not rounds:
        return {}
    stages = {field.name: [getattr(round_, field.name) for round_ in rounds] for field in fields(Round)}
    stages["wire_and_coordinator_seconds"] = [round_.wire_seconds + round_.coordinator_seconds for round_ in rounds]
    return {name.removesuffix("_seconds"): 1000 * median(values) for name, values in stages.items()}
