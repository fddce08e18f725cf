"""What a generation took."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from specd.vocabulary import SourceCounts, TokenSource, sums_by_source


@dataclass(frozen=True)
class RoundMeans:
    """Averages over the rounds after the first, which prefills: seconds by stage, tokens, and bytes on the wire."""

    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    queue_seconds: float = 0.0
    wire_seconds: float = 0.0
    coordinator_seconds: float = 0.0
    tokens: float = 0.0
    wire_bytes: float = 0.0


@dataclass(frozen=True)
class GenerationStatistics:
    """Statistics of a generation; the message `SessionStatistics` in generation.proto explains the fields.

    After `num_resumptions` of its stream, the counts of tokens and rounds, the smallest margin and the two times are
    those of all parts together, by the client's clock; the other fields are those of the last part.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    rounds: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: Sequence[int] = ()
    proposed_by_position: Sequence[int] = ()
    recovered_tokens: int = 0
    bonus_tokens: int = 0
    time_to_first_token_seconds: float = 0.0
    decode_seconds: float = 0.0
    admission_seconds: float = 0.0
    round_averages: RoundMeans = RoundMeans()
    rounds_without_draft: int = 0
    draft_fault: str = ""
    target_replays: int = 0
    target_reused_tokens: int = 0
    draft_reused_tokens: int = 0
    speedup: float = 0.0
    sources: Mapping[TokenSource, SourceCounts] = field(default_factory=dict)
    near_ties: int = 0
    smallest_margin: float | None = None
    smallest_margin_position: int | None = None
    num_resumptions: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over proposed tokens; 0 if none were proposed."""
        return self.accepted_tokens / self.proposed_tokens if self.proposed_tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first over the time that they took; 0 for a single token."""
        return (self.generated_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def target_only_tokens_per_second(self) -> float:
        """What the target alone would have done, by the estimate; 0 if that is not known."""
        return self.tokens_per_second / self.speedup if self.speedup else 0.0


@dataclass
class EarlierParts:
    """What the streams that broke brought, as their messages said; a message is a round, or several.

    `smallest_margin` is the smallest one, infinite without any, and its position.
    """

    generated_tokens: int = 0
    rounds: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    near_ties: int = 0
    sources: Mapping[TokenSource, SourceCounts] = field(default_factory=dict)
    smallest_margin: tuple[float, int] = (math.inf, 0)
    num_resumptions: int = 0

    def plus(self, part: EarlierParts) -> EarlierParts:
        """Return this with one more stream that broke."""
        counts = {name: value + getattr(part, name) for name, value in vars(self).items() if isinstance(value, int)}
        counts["num_resumptions"] = self.num_resumptions + 1
        return EarlierParts(
            **counts,
            sources=sums_by_source(self.sources, part.sources),
            smallest_margin=self._smaller(*part.smallest_margin),
        )

    def followed_by(
        self, last: GenerationStatistics, *, time_to_first_token_seconds: float, decode_seconds: float
    ) -> GenerationStatistics:
        """Return the statistics of the whole generation, whose last part has these."""
        if not self.num_resumptions:
            return last
        margin, position = last.smallest_margin, last.smallest_margin_position
        smallest = self._smaller(math.inf if margin is None else margin, position or 0)
        is_known = smallest[0] < math.inf
        return replace(
            last,
            prompt_tokens=last.prompt_tokens - self.generated_tokens,
            generated_tokens=last.generated_tokens + self.generated_tokens,
            rounds=last.rounds + self.rounds,
            proposed_tokens=last.proposed_tokens + self.proposed_tokens,
            accepted_tokens=last.accepted_tokens + self.accepted_tokens,
            sources=sums_by_source(self.sources, last.sources),
            near_ties=last.near_ties + self.near_ties,
            smallest_margin=smallest[0] if is_known else None,
            smallest_margin_position=smallest[1] if is_known else None,
            time_to_first_token_seconds=time_to_first_token_seconds,
            decode_seconds=decode_seconds,
            num_resumptions=self.num_resumptions,
        )

    def _smaller(self, margin: float, position: int) -> tuple[float, int]:
        """Return the smallest margin and its position, after a margin at a position of the next part."""
        return min(self.smallest_margin, (margin, self.generated_tokens + position))
