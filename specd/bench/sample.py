"""Measured completions, and their medians."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median

from specd.bench.setup import Setup


@dataclass(frozen=True)
class RoundTimes:
    """Times of the stages of one round, in seconds, the size of its messages, and the number of proposed tokens."""

    draft_seconds: float
    verify_seconds: float
    queue_seconds: float
    wire_seconds: float
    coordinator_seconds: float
    wire_bytes: int
    proposed: int = 0


@dataclass(frozen=True)
class Sample:
    """One completion of one prompt; `rejections` counts the rounds with a rejected token."""

    prompt: str
    repeat: int
    token_ids: tuple[int, ...]
    time_to_first_token_seconds: float
    decode_seconds: float
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    rejections: int = 0
    rounds: tuple[RoundTimes, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first over the time from the first to the last; 0 when there is only one."""
        return (len(self.token_ids) - 1) / self.decode_seconds if len(self.token_ids) > 1 else 0.0

    @property
    def verify_seconds(self) -> float:
        """Compute time of the target in the rounds after the first."""
        return sum(round_.verify_seconds for round_ in self.rounds)

    @property
    def limit_tokens_per_second(self) -> float:
        """Tokens after the first over `verify_seconds`; 0 without any.

        This is the speed with the measured acceptance and verify times if drafting, waiting, the wire and the
        coordinator took no time. The first token comes from the prefill, all others from these rounds.
        """
        return (len(self.token_ids) - 1) / self.verify_seconds if self.verify_seconds else 0.0

    def as_record(self) -> dict[str, object]:
        """Return the fields for JSON, with counts instead of tokens and rounds, and `verify_seconds`."""
        record = {field.name: getattr(self, field.name) for field in fields(self)}
        counts = {"token_ids": len(self.token_ids), "rounds": len(self.rounds)}
        return {**record, **counts, "verify_seconds": self.verify_seconds}


@dataclass(frozen=True)
class SetupResult:
    """Medians of a contender's samples, and its acceptance.

    The acceptance rate is accepted over proposed tokens. `acceptance_per_try` leaves out the tokens after a rejected
    one, which were never tried: it is the conditional acceptance at one draft position.

    The limit is what specd's speculation would give if all but verifying took no time: the tokens of the rounds after
    the first over the `verify_seconds` of these rounds (`Sample.limit_tokens_per_second`). `of_limit` is the median
    ratio of tokens per second to the limit, which is the share of the time in which the target computes.
    """

    setup: Setup
    tokens_per_second: float
    speedup: float
    limit_tokens_per_second: float | None
    of_limit: float | None
    time_to_first_token_seconds: float
    acceptance_rate: float | None
    acceptance_per_try: float | None
    acceptance_length: float | None
    round_milliseconds: dict[str, float]
    round_kilobytes: float | None

    def as_record(self) -> dict[str, object]:
        """Return the fields for JSON, those of the setup included."""
        record = asdict(self)
        setup = record.pop("setup")
        return {"name": self.setup.name, **setup, "acceptance": self.setup.acceptance.value, **record}


def summarise(setup: Setup, samples: Sequence[Sample], baseline: Sequence[Sample]) -> SetupResult:
    """Return the medians. The speed-up is the median of the samples' ratios to the baseline's."""
    pairs = _with_speed(samples, baseline)
    rounds = [round_ for sample in samples for round_ in sample.rounds]
    proposed = sum(sample.proposed_tokens for sample in samples)
    accepted = sum(sample.accepted_tokens for sample in samples)
    tries = accepted + sum(sample.rejections for sample in samples)
    limited = [own for own, _ in pairs if setup.speculates and own.limit_tokens_per_second]
    decoded = sum(len(sample.token_ids) - 1 for sample in samples)
    return SetupResult(
        setup=setup,
        tokens_per_second=median(own.tokens_per_second for own, _ in pairs),
        speedup=median_ratio(samples, baseline),
        limit_tokens_per_second=median(own.limit_tokens_per_second for own in limited) if limited else None,
        of_limit=median(own.tokens_per_second / own.limit_tokens_per_second for own in limited) if limited else None,
        time_to_first_token_seconds=median(sample.time_to_first_token_seconds for sample in samples),
        acceptance_rate=accepted / proposed if proposed else None,
        acceptance_per_try=accepted / tries if tries else None,
        acceptance_length=decoded / len(rounds) if rounds else None,
        round_milliseconds=_medians(rounds),
        round_kilobytes=median(round_.wire_bytes for round_ in rounds) / 1000 if rounds else None,
    )


def median_ratio(samples: Sequence[Sample], baseline: Sequence[Sample]) -> float:
    """Return the median of the ratios of tokens per second, sample by sample; 0 if no two have a speed."""
    ratios = [own.tokens_per_second / other.tokens_per_second for own, other in _with_speed(samples, baseline)]
    return median(ratios) if ratios else 0.0


def have_same_tokens(samples: Iterable[Sequence[Sample]]) -> bool:
    """Return whether all contenders gave the same tokens."""
    first, *others = ([sample.token_ids for sample in own] for own in samples)
    return all(other == first for other in others)


def whole_turns(samples: Mapping[Setup, Sequence[Sample]]) -> dict[Setup, list[Sample]]:
    """Return the samples of the turns that all contenders have ended.

    If there is no such turn, it returns the first sample of each contender that has one, if the first contender has.
    """
    num_turns = min(map(len, samples.values()), default=0)
    if num_turns or not next(iter(samples.values()), None):
        return {setup: list(own[:num_turns]) for setup, own in samples.items() if num_turns}
    return {setup: list(own[:1]) for setup, own in samples.items() if own}


def _with_speed(samples: Sequence[Sample], baseline: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    # Sampled texts can end with their first token, which has no speed.
    pairs = zip(samples, baseline, strict=True)
    return [(own, other) for own, other in pairs if own.tokens_per_second and other.tokens_per_second]


def count_rejections(drafted: Iterable[bool], num_draft_tokens: int) -> int:
    """Return the number of rejections in a text, by whether the draft proposed each token.

    A rejection is a token of the target's own after fewer than k tokens of the draft's. After k of them it is the
    bonus token. A last round that is cut short ends with an accepted token, which counts as none.
    """
    rejections = run = 0
    for is_drafted in drafted:
        rejections += not is_drafted and run < num_draft_tokens
        run = run + 1 if is_drafted else 0
    return rejections


def _medians(rounds: Sequence[RoundTimes]) -> dict[str, float]:
    """Return the medians in ms of each stage, of wire and coordinator together, and of the round."""
    if not rounds:
        return {}
    names = [field.name for field in fields(RoundTimes) if field.name.endswith("_seconds")]
    stages = {name: [getattr(round_, name) for round_ in rounds] for name in names}
    stages["wire_and_coordinator_seconds"] = [round_.wire_seconds + round_.coordinator_seconds for round_ in rounds]
    stages["total_seconds"] = [sum(getattr(round_, name) for name in names) for round_ in rounds]
    return {name.removesuffix("_seconds"): 1000 * median(values) for name, values in stages.items()}
