"""What one round was: the plain values that statistics and metrics are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.session import Commit, FinishReason
from specd.sampling import TokenDistribution, TokenLogProbabilities


@dataclass(frozen=True)
class Exchange:
    """Where the time of one request to a worker went, in seconds."""

    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    wire_seconds: float = 0.0
    wire_bytes: int = 0


@dataclass(frozen=True)
class Proposal:
    """What the draft proposes to come next; empty when it was not asked, or with a `fault` when it could not answer.

    With acceptance by REJECTION, `distributions` are those that the tokens were sampled from. `cached_len` is how many
    tokens its cache holds, `reused_len` how many it had when the stream began.
    """

    token_ids: list[int]
    distributions: Sequence[TokenDistribution] = ()
    cached_len: int = 0
    reused_len: int = 0
    exchange: Exchange = Exchange()
    fault: str = ""


@dataclass(frozen=True)
class Verdict:
    """How many proposed tokens the target accepts, and its own next token.

    `log_probabilities`, if asked for, are those of the accepted tokens and the next one. `cached_len` is how many
    tokens its cache holds, `reused_len` how many it had when the stream began.
    """

    num_accepted: int
    next_token_id: int
    cached_len: int = 0
    reused_len: int = 0
    log_probabilities: Sequence[TokenLogProbabilities] = ()
    exchange: Exchange = Exchange()


@dataclass(frozen=True)
class Round:
    """One propose and one verify, committed. Times in seconds, `ended_at` by the clock of the round loop."""

    commit: Commit
    ended_at: float
    num_proposed: int
    draft_fault: str
    draft_seconds: float
    verify_seconds: float
    queue_seconds: float
    wire_seconds: float
    coordinator_seconds: float
    wire_bytes: int = 0
    log_probabilities: Sequence[TokenLogProbabilities] = ()

    def cut(self, num_tokens: int, finish_reason: FinishReason) -> Round:
        """Return the round as if it had ended the session after its first `num_tokens` tokens."""
        return replace(self, commit=self.commit.cut(num_tokens, finish_reason))

    @classmethod
    def of(cls, proposal: Proposal, verdict: Verdict, commit: Commit, *, started_at: float, ended_at: float) -> Round:
        """Account for a round."""
        draft, verify = proposal.exchange, verdict.exchange
        queue_seconds = draft.queue_seconds + verify.queue_seconds
        wire_seconds = draft.wire_seconds + verify.wire_seconds
        elsewhere = draft.compute_seconds + verify.compute_seconds + queue_seconds + wire_seconds
        return cls(
            commit=commit,
            ended_at=ended_at,
            num_proposed=len(proposal.token_ids),
            draft_fault=proposal.fault,
            draft_seconds=draft.compute_seconds,
            verify_seconds=verify.compute_seconds,
            queue_seconds=queue_seconds,
            wire_seconds=wire_seconds,
            coordinator_seconds=ended_at - started_at - elsewhere,
            wire_bytes=draft.wire_bytes + verify.wire_bytes,
            log_probabilities=verdict.log_probabilities,
        )
