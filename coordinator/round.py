"""What one round was: the plain values that statistics and metrics are made of."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.session import Commit


@dataclass(frozen=True)
class Exchange:
    """Where the time of one request to a worker went, in seconds."""

    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    wire_seconds: float = 0.0


@dataclass(frozen=True)
class Proposal:
    """What the draft proposes to come next; empty when it was not asked, or with a `fault` when it could not answer."""

    token_ids: list[int]
    exchange: Exchange = Exchange()
    fault: str = ""


@dataclass(frozen=True)
class Verdict:
    """How many proposed tokens the target accepts, and its own next token."""

    num_accepted: int
    next_token_id: int
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
        )
