"""Statistics of a session."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from coordinator.core import STAGES, Round
from specd.vocabulary import SourceCounts, TokenSource, sums_by_source


@dataclass
class SessionStatistics:
    """Sums over the rounds of a session; generation.proto explains the fields.

    The metrics count the same rounds by the same rules: the sums over sessions equal the counters.
    """

    prompt_tokens: int
    admission_seconds: float = 0.0
    generated_tokens: int = 0
    rounds: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    proposed_by_position: list[int] = field(default_factory=list)
    recovered_tokens: int = 0
    bonus_tokens: int = 0
    time_to_first_token_seconds: float = 0.0
    decode_seconds: float = 0.0
    rounds_without_draft: int = 0
    draft_fault: str = ""
    target_replays: int = 0
    target_reused_tokens: int = 0
    draft_reused_tokens: int = 0
    sources: dict[TokenSource, SourceCounts] = field(default_factory=dict)
    # Sums over the rounds after the first, which prefills.
    stage_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    tokens_after_first_round: int = 0
    wire_bytes: int = 0
    near_ties: int = 0
    smallest_margin: float | None = None
    smallest_margin_position: int | None = None
    # Sums over the rounds that have a target-only estimate.
    round_seconds: float = 0.0
    target_only_seconds: float = 0.0

    @property
    def speedup(self) -> float:
        """The estimated time of the target alone over the measured time; 0 if it is not known."""
        return self.target_only_seconds / self.round_seconds if self.round_seconds else 0.0

    @property
    def wasted_tokens(self) -> int:
        """Proposed tokens that were not emitted."""
        return self.proposed_tokens - self.accepted_tokens

    @property
    def round_averages(self) -> dict[str, float]:
        """Averages over the rounds after the first; the message `RoundAverages` explains the entries."""
        rounds = max(self.rounds - 1, 1)
        sums = {f"{stage}_seconds": seconds for stage, seconds in self.stage_seconds.items()}
        sums |= {"tokens": self.tokens_after_first_round, "wire_bytes": self.wire_bytes}
        return {name: value / rounds for name, value in sums.items()}

    def add(self, round_: Round, *, arrived_at: float) -> None:
        """Count a round of a request that arrived at this time, by the clock of the round loop."""
        commit = round_.commit
        seconds_since_arrival = round_.ended_at - arrived_at
        if self.rounds == 0:
            self.time_to_first_token_seconds = seconds_since_arrival
            self.target_reused_tokens = round_.verdict.reused_len
        else:
            for stage, seconds in round_.stage_seconds.items():
                self.stage_seconds[stage] += seconds
            self.tokens_after_first_round += len(commit.token_ids)
            self.wire_bytes += round_.wire_bytes
            if round_.target_only_seconds:
                self.round_seconds += round_.seconds
                self.target_only_seconds += round_.target_only_seconds
        self.decode_seconds = seconds_since_arrival - self.time_to_first_token_seconds
        self.near_ties += round_.near_ties
        for position, margin in enumerate(round_.margins, start=self.generated_tokens):
            if margin.value < (math.inf if self.smallest_margin is None else self.smallest_margin):
                self.smallest_margin, self.smallest_margin_position = margin.value, position
        self.rounds += 1
        self.generated_tokens += len(commit.token_ids)
        if TokenSource.DRAFT not in self.sources:
            self.draft_reused_tokens = round_.proposal.drafted.reused_len
        self.sources = sums_by_source(self.sources, round_.source_counts)
        self.proposed_tokens += round_.num_proposed
        self.target_replays += round_.verdict.num_replays
        self.accepted_tokens += commit.num_accepted
        self.recovered_tokens += commit.recovered
        self.bonus_tokens += commit.bonus
        _count_by_position(self.proposed_by_position, round_.num_proposed)
        _count_by_position(self.accepted_by_position, commit.num_accepted)
        if round_.proposal.drafted.fault:
            self.rounds_without_draft += 1
            self.draft_fault = round_.proposal.drafted.fault


def _count_by_position(counts: list[int], num_tokens: int) -> None:
    counts.extend([0] * (num_tokens - len(counts)))
    for position in range(num_tokens):
        counts[position] += 1
