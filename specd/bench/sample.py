"""One measured decode, and what several come to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median

from specd.bench.setup import Setup


@dataclass(frozen=True)
class Round:
    """Where the time of one round went, in seconds, and the size of its messages.

    `was_ahead` says that the proposal was there before it was asked for.
    """

    draft_seconds: float
    verify_seconds: float
    queue_seconds: float
    wire_seconds: float
    coordinator_seconds: float
    wire_bytes: int
    was_ahead: bool = False


@dataclass(frozen=True)
class Sample:
    """One decode of one prompt; `rejections` are the rounds in which a proposed token was rejected."""

    prompt: str
    repeat: int
    token_ids: tuple[int, ...]
    time_to_first_token_seconds: float
    decode_seconds: float
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    rejections: int = 0
    rounds: tuple[Round, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first over the time from the first to the last; 0 when there is only one."""
        return (len(self.token_ids) - 1) / self.decode_seconds if len(self.token_ids) > 1 else 0.0

    @property
    def verify_seconds(self) -> float:
        """What the target computed in the rounds after the first."""
        return sum(round_.verify_seconds for round_ in self.rounds)

    @property
    def limit_tokens_per_second(self) -> float:
        """Tokens after the first over `verify_seconds`; 0 without any.

        So fast it would be if drafting, waiting, the wire and the coordinator took no time, with the acceptance and the
        times of verifying as they were measured. The first token comes from the prefill, all others from these rounds.
        """
        return (len(self.token_ids) - 1) / self.verify_seconds if self.verify_seconds else 0.0

    def as_record(self) -> dict[str, object]:
        """Return what is worth keeping, with counts in place of tokens and rounds, and what the limit is made of."""
        record = {field.name: getattr(self, field.name) for field in fields(self)}
        counts = {"token_ids": len(self.token_ids), "rounds": len(self.rounds)}
        return {**record, **counts, "verify_seconds": self.verify_seconds}


@dataclass(frozen=True)
class Result:
    """The medians of a contender's samples, and its acceptance.

    The acceptance rate is of proposed tokens; `acceptance_per_try` leaves out those after a rejected one, which nobody
    looked at: the probability that a token is accepted at a place where one is tried.

    The limit is what specd's speculation would give if all but verifying took no time: the tokens of the rounds after
    the first over the `verify_seconds` of these rounds (`Sample.limit_tokens_per_second`). `of_limit` is tokens per
    second over the limit, the median of the samples' own ratios as for `speedup`: the share of the time in which the
    target computes.
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
        """Return it for JSON, with the setup's fields among its own."""
        record = asdict(self)
        setup = record.pop("setup")
        return {"name": self.setup.name, **setup, "acceptance": self.setup.acceptance.value, **record}


def summarise(setup: Setup, samples: Sequence[Sample], baseline: Sequence[Sample]) -> Result:
    """Take the medians; the speed-up is the median over prompts and repeats of the ratio to the baseline's sample."""
    # Sampled texts can end with their first token, which has no speed.
    pairs = [
        (own, other)
        for own, other in zip(samples, baseline, strict=True)
        if own.tokens_per_second and other.tokens_per_second
    ]
    rounds = [round_ for sample in samples for round_ in sample.rounds]
    proposed = sum(sample.proposed_tokens for sample in samples)
    accepted = sum(sample.accepted_tokens for sample in samples)
    tries = accepted + sum(sample.rejections for sample in samples)
    limited = [own for own, _ in pairs if setup.speculates and own.limit_tokens_per_second]
    decoded = sum(len(sample.token_ids) - 1 for sample in samples)
    return Result(
        setup=setup,
        tokens_per_second=median(own.tokens_per_second for own, _ in pairs),
        speedup=median(own.tokens_per_second / other.tokens_per_second for own, other in pairs),
        limit_tokens_per_second=median(own.limit_tokens_per_second for own in limited) if limited else None,
        of_limit=median(own.tokens_per_second / own.limit_tokens_per_second for own in limited) if limited else None,
        time_to_first_token_seconds=median(sample.time_to_first_token_seconds for sample in samples),
        acceptance_rate=accepted / proposed if proposed else None,
        acceptance_per_try=accepted / tries if tries else None,
        acceptance_length=decoded / len(rounds) if rounds else None,
        round_milliseconds=_medians(rounds),
        round_kilobytes=median(round_.wire_bytes for round_ in rounds) / 1000 if rounds else None,
    )


def count_rejections(drafted: Iterable[bool], num_draft_tokens: int) -> int:
    """Count the rejections in a text of which we know for each token whether the draft proposed it.

    Each is a token of the target's own after fewer than k of the draft's: after k of them it is the bonus token, and
    where the last round is cut to fewer, an accepted proposal has no token after it.
    """
    rejections = run = 0
    for is_drafted in drafted:
        rejections += not is_drafted and run < num_draft_tokens
        run = run + 1 if is_drafted else 0
    return rejections


def _medians(rounds: Sequence[Round]) -> dict[str, float]:
    """Take the median of each stage, of what coordinator and wire take together, and of all stages."""
    if not rounds:
        return {}
    names = [field.name for field in fields(Round) if field.name.endswith("_seconds")]
    stages = {name: [getattr(round_, name) for round_ in rounds] for name in names}
    stages["wire_and_coordinator_seconds"] = [round_.wire_seconds + round_.coordinator_seconds for round_ in rounds]
    stages["total_seconds"] = [sum(getattr(round_, name) for name in names) for round_ in rounds]
    return {name.removesuffix("_seconds"): 1000 * median(values) for name, values in stages.items()}
