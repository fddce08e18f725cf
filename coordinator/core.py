"""The domain: a session's tokens, and the plan, proposal, verdict and commit of each of its rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from specd.sampling import Acceptance, Margin, Sampling, TokenDistribution, TokenLogProbabilities
from specd.setting_types import MAX_NUM_DRAFT_TOKENS
from specd.vocabulary import FinishReason, SourceCounts, TokenSource

# Where the time of a round goes. "coordinator" is what the others leave.
STAGES = ("draft", "verify", "queue", "wire", "coordinator")


@dataclass(frozen=True)
class SessionSetup:
    """The setup of a session for each worker, sent once: its id, its sampling, and the source that its tokens answer.

    Models without an encoder have no source. Only sessions of one `namespace` share cached prefixes. `adapter` is the
    name of the adapter of the target that decides the text, "" for none.
    """

    session_id: str
    sampling: Sampling
    source: Sequence[int] = ()
    namespace: bytes = field(kw_only=True)
    adapter: str = ""

    @property
    def has_short_messages(self) -> bool:
        """Whether each message has at most a few bytes for each token: no distributions, and no log-probabilities."""
        sampling = self.sampling
        rejects = sampling.acceptance is Acceptance.REJECTION
        return not (rejects or sampling.prompt_log_probabilities or sampling.top_log_probabilities is not None)


@dataclass(frozen=True)
class Match:
    """Tokens that a source would propose next, which cost nothing to know.

    `length` is the strength of the evidence, compared within one source only. For look-up it is how many of the latest
    tokens they follow from, as far as it was compared; 0 at the start of a text.
    """

    source: TokenSource
    token_ids: Sequence[int]
    length: int = 0

    @property
    def evidence(self) -> tuple[TokenSource, int]:
        """The values on which the probability of acceptance depends."""
        return self.source, self.length.bit_length()


@dataclass(frozen=True)
class Plan:
    """How many tokens each source may propose in a round.

    The sources propose one behind the other, each up to its limit, and up to `most` in all. The draft model's tokens
    end early, with its i-th token or the next, when the product of its first i confidences is below the i-th of
    `min_confidences`; without any, they do not end early.
    """

    limits: Mapping[TokenSource, int] = field(default_factory=dict)
    min_confidences: Sequence[float] = ()
    most: int = MAX_NUM_DRAFT_TOKENS

    def limit(self, source: TokenSource, num_before: int = 0) -> int:
        """Return how many tokens a source may propose, behind `num_before` of others."""
        return max(min(self.limits.get(source, 0), self.most - num_before), 0)

    def within(self, room: int) -> Plan:
        """Return a plan with at most `room` tokens, room >= 0."""
        return replace(self, most=min(self.most, room))


@dataclass(frozen=True)
class Exchange:
    """One request to a worker and its answer: seconds by place, and when it was sent by time.perf_counter.

    `num_sessions` sessions shared the worker's last step for it, with `step_tokens` tokens in all, padding included.
    The request brought `num_tokens` of the session's tokens: a few in each round, all after a loss.
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
        """The time from the request to its answer."""
        return self.queue_seconds + self.compute_seconds + self.wire_seconds


@dataclass(frozen=True)
class Part:
    """Tokens that one source proposes; none, with a `fault`, when a worker was asked and could not answer.

    With acceptance by REJECTION, `distributions` are those that the tokens were sampled from; a source without any is
    certain of its tokens. `confidences` has one value in [0, 1] for each token, if asked for. A worker's cache holds
    `cached_len` tokens, and took `reused_len` from the prefix cache when the stream began. `from_target` means
    that the target worker proposed the tokens itself, and keeps their distributions.
    """

    source: TokenSource
    token_ids: Sequence[int] = ()
    distributions: Sequence[TokenDistribution] = ()
    confidences: Sequence[float] = ()
    cached_len: int = 0
    reused_len: int = 0
    exchange: Exchange = Exchange()
    fault: str = ""
    from_target: bool = False


@dataclass(frozen=True)
class Proposal:
    """Tokens that may come next, in a part for each source that proposes. Workers send only the draft model's part."""

    parts: tuple[Part, ...] = ()

    @property
    def token_ids(self) -> list[int]:
        """The tokens of all parts."""
        return [token_id for part in self.parts for token_id in part.token_ids]

    def as_guesses(self) -> Proposal:
        """Return the proposal for a target that remembers no distributions: those of its own tokens are certain."""
        return Proposal(tuple(replace(part, from_target=False) for part in self.parts))

    @cached_property
    def drafted(self) -> Part:
        """The part of the draft model, which is empty when it was not asked."""
        return self.of(TokenSource.DRAFT)

    def of(self, source: TokenSource) -> Part:
        """Return the part of a source, an empty one if it has none."""
        for part in self.parts:
            if part.source is source:
                return part
        return Part(source)


@dataclass(frozen=True)
class Verdict:
    """The number of proposed tokens that the target accepts, and its own next token.

    `log_probabilities`, if requested, are for the accepted tokens and the next one, and `prompt_log_probabilities` for
    the session's tokens before the proposal, without the first. Lengths are as in Proposal. The target was lost
    `num_replays` times before it answered, and got the session's tokens again; `was_retried` is also true if it was
    late or full. With COUPLED acceptance, `margins` are for the accepted tokens and the next one.
    """

    num_accepted: int
    next_token_id: int
    cached_len: int = 0
    reused_len: int = 0
    log_probabilities: Sequence[TokenLogProbabilities] = ()
    exchange: Exchange = Exchange()
    num_replays: int = 0
    was_retried: bool = False
    prompt_log_probabilities: Sequence[TokenLogProbabilities] = ()
    margins: Sequence[Margin] = ()


@dataclass(frozen=True)
class Commit:
    """The tokens that a round emits: the accepted tokens, then the target's own, unless the text ended before it.

    The target's own token is `recovered` after a rejection, and a `bonus` otherwise. The session's last commit has a
    finish reason.
    """

    token_ids: list[int]
    num_accepted: int
    recovered: bool = False
    bonus: bool = False
    finish_reason: FinishReason | None = None

    def cut(self, num_tokens: int, finish_reason: FinishReason) -> Commit:
        """Return the first `num_tokens` tokens, as the session's end."""
        assert 0 < num_tokens <= len(self.token_ids)
        is_whole = num_tokens == len(self.token_ids)
        return Commit(
            self.token_ids[:num_tokens],
            min(self.num_accepted, num_tokens),
            recovered=self.recovered and is_whole,
            bonus=self.bonus and is_whole,
            finish_reason=finish_reason,
        )


@dataclass
class Session:
    """One decode. The coordinator owns its tokens; the workers' caches are copies of prefixes of them.

    End and stop tokens end it only after `min_tokens` others.
    Invariant: len(token_ids) == prompt_len + num_generated, 0 <= num_generated <= max_tokens.
    """

    session_id: str
    token_ids: list[int]
    max_tokens: int
    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    finish_reason: FinishReason | None = None
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.token_ids)
        assert self.prompt_len > 0
        assert self.max_tokens > 0

    @property
    def num_generated(self) -> int:
        """Tokens emitted so far."""
        return len(self.token_ids) - self.prompt_len

    @property
    def can_draft(self) -> bool:
        """Whether any round can have a proposal: the first has none, nor has one with room for a single token."""
        return self.max_tokens > 2

    def bound(self, plan: Plan) -> Plan:
        """Return the plan, cut to the room that is left.

        The first round has no proposal: the target prefills, and the first token must not wait for the draft. Full
        acceptance with the bonus token must not exceed max_tokens.
        """
        return plan.within(self.max_tokens - self.num_generated - 1 if self.num_generated else 0)

    def bound_ahead(self, plan: Plan) -> Plan:
        """Return the plan of the round after the present one, which emits a token at least, cut to the room left."""
        return plan.within(max(self.max_tokens - self.num_generated - 2, 0))

    def commit(self, proposal: Sequence[int], num_accepted: int, next_token_id: int) -> Commit:
        """Append the accepted part of the proposal and the target's own next token, up to the first end token."""
        assert self.finish_reason is None
        assert 0 <= num_accepted <= len(proposal) < self.max_tokens - self.num_generated
        is_full = num_accepted == len(proposal)
        commit = Commit([*proposal[:num_accepted], next_token_id], num_accepted, recovered=not is_full, bonus=is_full)
        for i, token_id in enumerate(commit.token_ids):
            reason = self._finish_reason(token_id, self.num_generated + i)
            if reason is not None:
                commit = commit.cut(i + 1, reason)
                break
        self.token_ids.extend(commit.token_ids)
        self.finish_reason = commit.finish_reason
        return commit

    def _finish_reason(self, token_id: int, num_before: int) -> FinishReason | None:
        """Return the finish reason if a token after `num_before` generated ones is the last."""
        if num_before >= self.min_tokens:
            if token_id in self.eos_token_ids:
                return FinishReason.EOS
            if token_id in self.stop_token_ids:
                return FinishReason.STOP_TOKEN
        return FinishReason.LENGTH if num_before + 1 == self.max_tokens else None


@dataclass(frozen=True)
class Round:
    """One propose and one verify, committed. Times in seconds, by the clock of the round loop.

    `target_only_seconds` is the estimated time of the target alone for the same tokens, 0 if it is not known.
    """

    proposal: Proposal
    verdict: Verdict
    commit: Commit
    started_at: float
    ended_at: float
    target_only_seconds: float = 0.0

    @property
    def num_proposed(self) -> int:
        """Tokens that the target verified."""
        return sum(len(part.token_ids) for part in self.proposal.parts)

    @cached_property
    def source_counts(self) -> dict[TokenSource, SourceCounts]:
        """The tokens of its proposal by source, and those of them that were accepted and emitted."""
        counts, left = {}, self.commit.num_accepted
        for part in self.proposal.parts:
            if part.token_ids:
                num_accepted = min(len(part.token_ids), left)
                counts[part.source] = SourceCounts(len(part.token_ids), num_accepted)
                left -= num_accepted
        return counts

    @property
    def sources(self) -> list[TokenSource]:
        """The sources of its tokens."""
        accepted = [source for source, counts in self.source_counts.items() for _ in range(counts.accepted)]
        return accepted + [TokenSource.TARGET] * (len(self.commit.token_ids) - len(accepted))

    @property
    def margins(self) -> Sequence[Margin]:
        """The margins of its tokens, in order; none if the target sent none."""
        return self.verdict.margins[: len(self.commit.token_ids)]

    @property
    def near_ties(self) -> int:
        """How many of its tokens were near ties."""
        return sum(margin.is_near_tie for margin in self.margins)

    @property
    def seconds(self) -> float:
        """The time of the round."""
        return self.ended_at - self.started_at

    @property
    def stage_seconds(self) -> dict[str, float]:
        """Seconds by stage, in the order of STAGES."""
        propose, verify = self.proposal.drafted.exchange, self.verdict.exchange
        values = (
            propose.compute_seconds,
            verify.compute_seconds,
            propose.queue_seconds + verify.queue_seconds,
            propose.wire_seconds + verify.wire_seconds,
            self.seconds - propose.seconds - verify.seconds,
        )
        return dict(zip(STAGES, values, strict=True))

    @property
    def wire_bytes(self) -> int:
        """Size of the messages to and from the workers."""
        return self.proposal.drafted.exchange.wire_bytes + self.verdict.exchange.wire_bytes

    def cut(self, num_tokens: int, finish_reason: FinishReason) -> Round:
        """Return the round as if the session had ended with the first `num_tokens` of its tokens."""
        return replace(self, commit=self.commit.cut(num_tokens, finish_reason))
