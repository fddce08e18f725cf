"""What one round was: the plain values that statistics and metrics are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.session import Commit, FinishReason
from specd.sampling import TokenDistribution, TokenLogProbabilities


@dataclass(frozen=True)
class Exchange:
    """Where the time of one request to a worker went, in seconds, and when it was sent by time.perf_counter.

    `num_sessions` shared the worker's step, which took in `step_tokens` of all of them. It was sent `num_tokens` tokens
    of the session: a few in each round, all of them after it was lost.
    """

    queue_seconds: float = 0.0
    compute_seconds: float = 0.0
    wire_seconds: float = 0.0
    wire_bytes: int = 0
    num_sessions: int = 1
    step_tokens: int = 1
    num_tokens: int = 1
    sent_at: float = 0.0

    @property
    def seconds(self) -> float:
        """From the request to its answer."""
        return self.queue_seconds + self.compute_seconds + self.wire_seconds


@dataclass(frozen=True)
class Proposal:
    """What the draft proposes to come next; empty when it was not asked, or with a `fault` when it could not answer.

    `confidences` say how clear the choice of each token was, if they were asked for; with acceptance by REJECTION,
    `distributions` are those that the tokens were sampled from. `cached_len` is how many tokens the draft's cache
    holds, `reused_len` how many it had when the stream began. A proposal that `was_ahead` was there before it was asked
    for.
    """

    token_ids: list[int]
    distributions: Sequence[TokenDistribution] = ()
    cached_len: int = 0
    reused_len: int = 0
    exchange: Exchange = Exchange()
    fault: str = ""
    confidences: Sequence[float] = ()
    was_ahead: bool = False


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
    """One propose and one verify, committed. Times in seconds, by the clock of the round loop.

    `target_only_seconds` is what the target alone takes for as many tokens, 0 where that is not known. If it
    `went_ahead`, the draft was let go on while the target verified; `saved_seconds` is the time for a proposal that was
    there already because it had.
    """

    proposal: Proposal
    verdict: Verdict
    commit: Commit
    started_at: float
    ended_at: float
    target_only_seconds: float = 0.0
    went_ahead: bool = False
    saved_seconds: float = 0.0

    @property
    def num_proposed(self) -> int:
        """Tokens that the target verified."""
        return len(self.proposal.token_ids)

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended_at - self.started_at

    @property
    def draft_seconds(self) -> float:
        """Computing in the draft worker while the round waited for it."""
        return self.proposal.exchange.compute_seconds

    @property
    def verify_seconds(self) -> float:
        """Computing in the target worker."""
        return self.verdict.exchange.compute_seconds

    @property
    def queue_seconds(self) -> float:
        """Waiting in the workers."""
        return self.proposal.exchange.queue_seconds + self.verdict.exchange.queue_seconds

    @property
    def wire_seconds(self) -> float:
        """On the way to the workers and back."""
        return self.proposal.exchange.wire_seconds + self.verdict.exchange.wire_seconds

    @property
    def coordinator_seconds(self) -> float:
        """All the rest."""
        return self.seconds - self.proposal.exchange.seconds - self.verdict.exchange.seconds

    @property
    def wire_bytes(self) -> int:
        """Size of the messages to and from the workers."""
        return self.proposal.exchange.wire_bytes + self.verdict.exchange.wire_bytes

    def cut(self, num_tokens: int, finish_reason: FinishReason) -> Round:
        """Return the round as if it had ended the session after its first `num_tokens` tokens."""
        return replace(self, commit=self.commit.cut(num_tokens, finish_reason))
