"""What the coordinator counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from coordinator.round import Round
from coordinator.session import FinishReason
from coordinator.statistics import SessionStatistics
from specd.metrics import SECONDS_BUCKETS
from specd.model_info import ModelInfo

_STAGES = ("draft", "verify", "queue", "wire", "coordinator")
_ALERTING_ERRORS = (
    ("RESOURCE_EXHAUSTED", "QUEUE_FULL"),
    ("UNAVAILABLE", "TARGET_UNAVAILABLE"),
    ("INTERNAL", "INTERNAL"),
)


class CoordinatorMetrics:
    """The metrics of the coordinator, in a registry that the caller chose.

    Acceptance rate is specd_accepted_tokens_total / specd_proposed_tokens_total, mean acceptance length
    specd_generated_tokens_total / specd_rounds_total.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(name, text, labels, buckets=SECONDS_BUCKETS, registry=registry)

        self.rounds = counter("specd_rounds", "Rounds committed, target-only ones included.")
        self.prompt_tokens = counter("specd_prompt_tokens", "Tokens of the prompts of sessions that began.")
        self.generated_tokens = counter("specd_generated_tokens", "Tokens emitted.")
        self.proposed_tokens = counter("specd_proposed_tokens", "Tokens proposed by the draft and verified.")
        self.accepted_tokens = counter("specd_accepted_tokens", "Proposed tokens accepted by the target and emitted.")
        self.accepted_tokens_by_position = counter(
            "specd_accepted_tokens_by_position", "Accepted tokens by place in the proposal, from 0.", "position"
        )
        self.proposed_tokens_by_position = counter(
            "specd_proposed_tokens_by_position", "Proposed tokens by place in the proposal, from 0.", "position"
        )
        self.recovered_tokens = counter("specd_recovered_tokens", "Tokens sampled by the target after a rejection.")
        self.bonus_tokens = counter("specd_bonus_tokens", "Tokens sampled by the target after full acceptance.")
        self.rounds_without_draft = counter(
            "specd_rounds_without_draft", "Rounds that asked for a proposal and got none, by reason.", "reason"
        )
        self.rounds_ahead = counter(
            "specd_rounds_ahead", "Rounds whose proposal was there before it was asked for, from going ahead."
        )
        self.rounds_gone_ahead = counter(
            "specd_rounds_gone_ahead", "Rounds in which the draft was let go ahead while the target verified."
        )
        self.ahead_saved_seconds = counter(
            "specd_ahead_saved_seconds",
            "What drafting the proposals that were there already would have taken, by what it usually takes.",
        )
        self.round_seconds = counter(
            "specd_round_seconds",
            "Time of the rounds for which it is known what the target alone would have taken; no session's first is.",
        )
        self.target_only_seconds = counter(
            "specd_target_only_seconds",
            "What the target alone would have taken for the tokens of these rounds; over specd_round_seconds_total, "
            "that is the speed-up.",
        )
        self.chosen_draft_tokens = Histogram(
            "specd_round_draft_tokens",
            "Draft tokens of a round (rounds after a session's first).",
            buckets=(0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32),
            registry=registry,
        )
        self.target_replays = counter("specd_target_replays", "Sessions sent again to a target that had been lost.")
        self.sessions = counter(
            "specd_sessions", "Generations that ended, by finish reason, cancelled or failed.", "outcome"
        )
        self.reused_tokens = counter(
            "specd_reused_prompt_tokens", "Prompt tokens that a worker had in its prefix cache, by worker.", "worker"
        )
        self.errors = counter(
            "specd_errors", "Requests that ended with an error, by gRPC status code and reason.", "code", "reason"
        )
        self.time_to_first_token = histogram(
            "specd_time_to_first_token_seconds", "From the arrival of a request to its first token."
        )
        self.admission = histogram(
            "specd_admission_seconds", "From the arrival of a request until its session began to run."
        )
        self.time_per_output_token = histogram(
            "specd_time_per_output_token_seconds", "Of a session: first to last token, over the tokens after the first."
        )
        self.round_stage = histogram(
            "specd_round_stage_seconds", "Where a round spends its time (rounds after a session's first).", "stage"
        )
        self.active_sessions = Gauge("specd_active_sessions", "Sessions under way.", registry=registry)
        self.queued_requests = Gauge(
            "specd_queued_requests", "Requests that wait until there is room for them.", registry=registry
        )
        self.max_sessions = Gauge("specd_max_sessions", "Sessions that may run at the same time.", registry=registry)
        self.max_queued_requests = Gauge(
            "specd_max_queued_requests", "Requests beyond those that may wait.", registry=registry
        )
        self.reserved_tokens = Gauge(
            "specd_reserved_tokens", "Tokens that the sessions under way can come to.", registry=registry
        )
        self.capacity_tokens = Gauge(
            "specd_capacity_tokens", "Tokens that the target worker has room for in its cache.", registry=registry
        )
        self.sessions_by_state = Gauge(
            "specd_sessions_by_state", "Active sessions: prefilling or decoding.", ["state"], registry=registry
        )
        self.session_tokens = Gauge(
            "specd_session_tokens", "Tokens of the sessions that are decoding.", registry=registry
        )
        self.kept_sessions = Gauge(
            "specd_kept_sessions", "Sessions that are kept to be continued, or run now.", registry=registry
        )
        self.kept_session_tokens = Gauge(
            "specd_kept_session_tokens", "Tokens of the kept sessions that do not run now.", registry=registry
        )
        self.draft_available = Gauge(
            "specd_draft_available", "1 while a draft that fits the target is connected.", registry=registry
        )
        self.target_available = Gauge("specd_target_available", "1 while the target is connected.", registry=registry)
        self._models = Gauge(
            "specd_model_info",
            "1 for the models that are connected, or last were; empty names before.",
            ["target", "draft"],
            registry=registry,
        )
        self._model_names = {"target": "", "draft": ""}
        self.wire_bytes = counter("specd_wire_bytes", "Size of the messages between coordinator and workers.")
        for outcome in (*(reason.value for reason in FinishReason), "cancelled", "failed"):
            self.sessions.labels(outcome)
        for worker in ("draft", "target"):
            self.reused_tokens.labels(worker)
        # Those that alerts are for: of a series that begins with the first error, Prometheus sees no rise.
        for code, reason in _ALERTING_ERRORS:
            self.errors.labels(code, reason)
        for reason in ("DRAFT_UNAVAILABLE", "DRAFT_LATE"):
            self.rounds_without_draft.labels(reason)

    def show_worker(self, worker: str, model: ModelInfo | None) -> None:
        """Show whether the "draft" or "target" worker is there, and with which model."""
        available = self.draft_available if worker == "draft" else self.target_available
        available.set(model is not None)
        if model is not None:
            self._model_names[worker] = model.name
            self._models.clear()
            self._models.labels(**self._model_names).set(1)

    def count_round(self, round_: Round, *, first: bool) -> None:
        """Count a round; `first` is the one that prefills."""
        commit = round_.commit
        self.rounds.inc()
        self.generated_tokens.inc(len(commit.token_ids))
        self.proposed_tokens.inc(round_.num_proposed)
        self.accepted_tokens.inc(commit.num_accepted)
        self.wire_bytes.inc(round_.wire_bytes)
        for position in range(round_.num_proposed):
            self.proposed_tokens_by_position.labels(position).inc()
        for position in range(commit.num_accepted):
            self.accepted_tokens_by_position.labels(position).inc()
        self.recovered_tokens.inc(commit.recovered)
        self.bonus_tokens.inc(commit.bonus)
        if round_.proposal.fault:
            self.rounds_without_draft.labels(round_.proposal.fault).inc()
        self.rounds_gone_ahead.inc(round_.went_ahead)
        self.rounds_ahead.inc(round_.proposal.was_ahead)
        self.ahead_saved_seconds.inc(round_.saved_seconds)
        if not first:
            self.chosen_draft_tokens.observe(round_.num_proposed)
            if round_.target_only_seconds:
                self.round_seconds.inc(round_.seconds)
                self.target_only_seconds.inc(round_.target_only_seconds)
            for stage in _STAGES:
                self.round_stage.labels(stage).observe(getattr(round_, f"{stage}_seconds"))

    def count_session(self, statistics: SessionStatistics, outcome: str, *, target_replays: int) -> None:
        """Count a session that ended."""
        self.sessions.labels(outcome).inc()
        self.target_replays.inc(target_replays)
        self.admission.observe(statistics.admission_seconds)
        self.reused_tokens.labels("draft").inc(statistics.draft_reused_tokens)
        self.reused_tokens.labels("target").inc(statistics.target_reused_tokens)
        if statistics.generated_tokens > 0:
            self.time_to_first_token.observe(statistics.time_to_first_token_seconds)
        if statistics.generated_tokens > 1:
            seconds = statistics.decode_seconds / (statistics.generated_tokens - 1)
            self.time_per_output_token.observe(seconds)
