"""What a session adds up to."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.round import Round


@dataclass
class SessionStatistics:
    """Sums over the rounds of a session; the fields are explained in generation.proto.

    The metrics count the same rounds by the same rules, so the sums over sessions equal the counters.
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
    rounds_gone_ahead: int = 0
    rounds_ahead: int = 0
    ahead_saved_seconds: float = 0.0
    rounds_without_draft: int = 0
    draft_fault: str = ""
    target_replays: int = 0
    target_reused_tokens: int = 0
    draft_reused_tokens: int = 0
    # Sums over the rounds after the first, the prefill.
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    queue_seconds: float = 0.0
    wire_seconds: float = 0.0
    coordinator_seconds: float = 0.0
    tokens_after_first_round: int = 0
    wire_bytes: int = 0
    # Sums over those of them for which it is known what the target alone would have taken.
    round_seconds: float = 0.0
    target_only_seconds: float = 0.0

    @property
    def speedup(self) -> float:
        """How many times as long the target alone would have taken, as far as that is known; 0 if it is not."""
        return self.target_only_seconds / self.round_seconds if self.round_seconds else 0.0

    @property
    def wasted_tokens(self) -> int:
        """Tokens that the draft proposed and that were not emitted."""
        return self.proposed_tokens - self.accepted_tokens

    def add(self, round_: Round, *, arrived_at: float) -> None:
        """Count a round of a request that arrived then, by the clock of the round loop."""
        commit = round_.commit
        seconds_since_arrival = round_.ended_at - arrived_at
        if self.rounds == 0:
            self.time_to_first_token_seconds = seconds_since_arrival
        else:
            self.draft_seconds += round_.draft_seconds
            self.verify_seconds += round_.verify_seconds
            self.queue_seconds += round_.queue_seconds
            self.wire_seconds += round_.wire_seconds
            self.coordinator_seconds += round_.coordinator_seconds
            self.tokens_after_first_round += len(commit.token_ids)
            self.wire_bytes += round_.wire_bytes
            if round_.target_only_seconds:
                self.round_seconds += round_.seconds
                self.target_only_seconds += round_.target_only_seconds
        self.decode_seconds = seconds_since_arrival - self.time_to_first_token_seconds
        self.rounds += 1
        self.generated_tokens += len(commit.token_ids)
        self.rounds_gone_ahead += round_.went_ahead
        self.rounds_ahead += round_.proposal.was_ahead
        self.ahead_saved_seconds += round_.saved_seconds
        self.proposed_tokens += round_.num_proposed
        self.accepted_tokens += commit.num_accepted
        self.recovered_tokens += commit.recovered
        self.bonus_tokens += commit.bonus
        _count_by_position(self.proposed_by_position, round_.num_proposed)
        _count_by_position(self.accepted_by_position, commit.num_accepted)
        if round_.proposal.fault:
            self.rounds_without_draft += 1
            self.draft_fault = round_.proposal.fault


def _count_by_position(counts: list[int], num_tokens: int) -> None:
    counts.extend([0] * (num_tokens - len(counts)))
    for position in range(num_tokens):
        counts[position] += 1
