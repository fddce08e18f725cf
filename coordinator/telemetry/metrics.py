"""The coordinator's metrics."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from coordinator.core import Round
from coordinator.telemetry.statistics import SessionStatistics
from specd.model_info import ModelInfo
from specd.rpc.metrics_endpoint import SECONDS_BUCKETS
from specd.vocabulary import PROPOSERS, FinishReason

# Names without "specd_": what they count, and their labels.
_COUNTERS: dict[str, tuple[str, ...]] = {
    "rounds": ("Rounds committed, target-only ones included.",),
    "prompt_tokens": ("Prompt tokens of sessions that began.",),
    "generated_tokens": ("Tokens emitted.",),
    "proposed_tokens": ("Tokens proposed and verified.",),
    "accepted_tokens": ("Proposed tokens accepted by the target and emitted.",),
    "accepted_tokens_by_position": ("Accepted tokens by draft position, from 0.", "position"),
    "proposed_tokens_by_position": ("Proposed tokens by draft position, from 0.", "position"),
    "proposed_tokens_by_source": ("Proposed tokens by their source.", "source"),
    "accepted_tokens_by_source": ("Accepted tokens by their source.", "source"),
    "recovered_tokens": ("Tokens sampled by the target after a rejection.",),
    "bonus_tokens": ("Tokens sampled by the target after full acceptance.",),
    "constrained_tokens": ("Tokens emitted in the form of a grammar.",),
    "sessions_by_draft": ("Sessions that begin with the present draft worker, or with the canary.", "draft"),
    "near_ties": ("Tokens chosen within the rounding of the target's device.",),
    "rounds_without_draft": ("Rounds that asked for a proposal and got none, by reason.", "reason"),
    "round_seconds": ("Time of the rounds after a session's first that have a target-only estimate.",),
    "target_only_seconds": ("That estimate, for their tokens; over specd_round_seconds_total, the speed-up.",),
    "target_replays": ("Sessions sent again to a target, because it had been lost, or because they moved to it.",),
    "session_moves": ("Sessions that moved from one target to another.",),
    "sessions": ("Generations by finish reason, cancelled or failed.", "outcome"),
    "unsaved_turns": ("Turns that could not be kept in the session file or on the session server.",),
    "reused_prompt_tokens": ("Prompt tokens that a worker had in its prefix cache, by worker.", "worker"),
    "wire_bytes": ("Size of the messages between coordinator and workers.",),
}
_HISTOGRAMS: dict[str, tuple[str, ...]] = {
    "time_to_first_token_seconds": ("From the arrival of a request to its first token.",),
    "admission_seconds": ("From the arrival of a request until its session began to run.",),
    "time_per_output_token_seconds": ("From a session's first token to its last, over the tokens after the first.",),
    "round_stage_seconds": ("Time of a round by stage (rounds after a session's first).", "stage"),
}
_GAUGES: dict[str, tuple[str, ...]] = {
    "active_sessions": ("Sessions under way.",),
    "sessions_by_state": ("Active sessions: prefilling or decoding.", "state"),
    "session_tokens": ("Tokens of the sessions under way.",),
    "paused_sessions": ("Sessions that wait for their client to read, or have yielded to another session.",),
    "queued_requests": ("Requests that wait until there is room for them.",),
    "target_sessions": ("Running sessions by target.", "target"),
    "target_max_sessions": ("Sessions that may run at a target.", "target"),
    "target_ready": ("1 while this target is connected.", "target"),
    "max_sessions": ("Sessions that may run at the same time.",),
    "max_queued_requests": ("Requests beyond those that may wait.",),
    "reserved_bytes": ("Memory to which the running sessions can grow in the target worker's cache.",),
    "capacity_bytes": ("Memory that the target worker has for the caches of sessions.",),
    "kept_sessions": ("Sessions that are kept to be continued, or run now.",),
    "kept_session_tokens": ("Tokens of the kept sessions that do not run now.",),
    "canary_state": ("1 for the state of the draft on trial: undecided, kept or taken back.", "state"),
    "canary_rounds": ("Rounds of the draft on trial that count for the decision.",),
    "draft_available": ("1 while a draft that fits the target is connected.",),
    "target_available": ("1 while a target is connected.",),
    "model_state": ("1 for the present state of a model that is loaded on demand.", "state"),
    "model_info": ("1 for the models that are connected, or last were; empty names before.", "target", "draft"),
}
# Gauges of the work at the targets; a model that is not loaded has none, but it has kept sessions.
_OF_TARGETS = (
    *("active_sessions", "session_tokens", "paused_sessions", "queued_requests", "max_sessions"),
    *("max_queued_requests", "reserved_bytes", "capacity_bytes"),
)
# A counter whose series begins with its first count shows Prometheus no rise: those with alerts begin at 0.
_FIRST_LABELS: dict[str, tuple[tuple[str, ...], ...]] = {
    "rounds_without_draft": (("DRAFT_UNAVAILABLE",), ("DRAFT_LATE",)),
    "sessions_by_draft": (("present",), ("canary",)),
    "sessions": (*((reason.value,) for reason in FinishReason), ("cancelled",), ("failed",)),
    "reused_prompt_tokens": (("draft",), ("target",)),
    "proposed_tokens_by_source": tuple((source.value,) for source in PROPOSERS),
    "accepted_tokens_by_source": tuple((source.value,) for source in PROPOSERS),
}


_FIRST_ERRORS = (
    ("RESOURCE_EXHAUSTED", "QUEUE_FULL"),
    ("DEADLINE_EXCEEDED", "CLIENT_STALLED"),
    ("UNAVAILABLE", "TARGET_UNAVAILABLE"),
    ("INTERNAL", "INTERNAL"),
)


def error_counter(registry: CollectorRegistry) -> Counter:
    """Return a counter of requests that failed, by gRPC status code and reason."""
    text = "Requests that failed, by gRPC status code and reason."
    counter = Counter("specd_errors", text, ("code", "reason"), registry=registry)
    for labels in _FIRST_ERRORS:
        counter.labels(*labels)
    return counter


class CoordinatorMetrics:
    """The metrics of a model's generations, in a registry that the caller chose.

    Acceptance rate is specd_accepted_tokens_total / specd_proposed_tokens_total, mean acceptance length
    specd_generated_tokens_total / specd_rounds_total.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counters = {
            name: Counter(f"specd_{name}", text, labels, registry=registry)
            for name, (text, *labels) in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(f"specd_{name}", text, labels, buckets=SECONDS_BUCKETS, registry=registry)
            for name, (text, *labels) in _HISTOGRAMS.items()
        }
        self._gauges = {
            name: Gauge(f"specd_{name}", text, labels, registry=registry) for name, (text, *labels) in _GAUGES.items()
        }
        self._draft_tokens = Histogram(
            "specd_round_draft_tokens",
            "Draft tokens of a round (rounds after a session's first).",
            buckets=(0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32),
            registry=registry,
        )
        # The library's own look-up of a series is a tenth of a round's work.
        self._series = cache(lambda name, label: self._counters[name].labels(label))
        self._model_names = {"target": "", "draft": ""}
        self.subject: object = None  # the model of this name that the gauges show, as another one can replace it
        for name, series in _FIRST_LABELS.items():
            for labels in series:
                self._counters[name].labels(*labels)

    def show(self, name: str, value: Callable[[], float], *labels: str) -> None:
        """Read the gauge specd_{name} from a function at each scrape."""
        gauge = self._gauges[name]
        (gauge.labels(*labels) if labels else gauge).set_function(value)

    def hide(self, name: str, *labels: str) -> None:
        """Remove a series of the gauge specd_{name}."""
        self._gauges[name].remove(*labels)

    def show_no_workers(self) -> None:
        """Show that there is neither a target nor a draft, and nothing at them."""
        for name in _OF_TARGETS:
            self.show(name, lambda: 0.0)
        self._gauges["sessions_by_state"].clear()
        for worker in ("target", "draft"):
            self.show_worker(worker, None)

    def count_unsaved_turn(self) -> None:
        """Count a turn that could not be written to the session file."""
        self._counters["unsaved_turns"].inc()

    def count_draft_session(self, *, is_canary: bool) -> None:
        """Count a session that begins with a draft worker."""
        self._series("sessions_by_draft", "canary" if is_canary else "present").inc()

    def count_move(self) -> None:
        """Count a session that moved to another target."""
        self._counters["session_moves"].inc()

    def show_worker(self, worker: str, model: ModelInfo | None) -> None:
        """Show whether the "draft" or "target" worker is there, and with which model."""
        self._gauges[f"{worker}_available"].set(model is not None)
        if model is not None:
            self._model_names[worker] = model.public_name
            self._gauges["model_info"].clear()
            self._gauges["model_info"].labels(**self._model_names).set(1)

    def count_prompt(self, num_tokens: int) -> None:
        """Count the prompt of a session that begins."""
        self._counters["prompt_tokens"].inc(num_tokens)

    def count_round(self, round_: Round, *, first: bool, constrained: bool = False) -> None:
        """Count a round; a session's `first` one prefills, and one with a grammar is `constrained`."""
        counters, commit = self._counters, round_.commit
        counters["rounds"].inc()
        counters["generated_tokens"].inc(len(commit.token_ids))
        counters["proposed_tokens"].inc(round_.num_proposed)
        counters["accepted_tokens"].inc(commit.num_accepted)
        counters["wire_bytes"].inc(round_.wire_bytes)
        for position in range(round_.num_proposed):
            self._series("proposed_tokens_by_position", position).inc()
        for position in range(commit.num_accepted):
            self._series("accepted_tokens_by_position", position).inc()
        for source, counts in round_.source_counts.items():
            self._series("proposed_tokens_by_source", source.value).inc(counts.proposed)
            self._series("accepted_tokens_by_source", source.value).inc(counts.accepted)
        counters["recovered_tokens"].inc(commit.recovered)
        counters["bonus_tokens"].inc(commit.bonus)
        if constrained:
            counters["constrained_tokens"].inc(len(commit.token_ids))
        counters["near_ties"].inc(round_.near_ties)
        counters["target_replays"].inc(round_.verdict.num_replays)
        if round_.proposal.drafted.fault:
            counters["rounds_without_draft"].labels(round_.proposal.drafted.fault).inc()
        if first:
            return
        self._draft_tokens.observe(round_.num_proposed)
        if round_.target_only_seconds:
            counters["round_seconds"].inc(round_.seconds)
            counters["target_only_seconds"].inc(round_.target_only_seconds)
        for stage, seconds in round_.stage_seconds.items():
            self._histograms["round_stage_seconds"].labels(stage).observe(seconds)

    def count_session(self, statistics: SessionStatistics, outcome: str) -> None:
        """Count a session that ended."""
        self._counters["sessions"].labels(outcome).inc()
        self._histograms["admission_seconds"].observe(statistics.admission_seconds)
        self._counters["reused_prompt_tokens"].labels("draft").inc(statistics.draft_reused_tokens)
        self._counters["reused_prompt_tokens"].labels("target").inc(statistics.target_reused_tokens)
        if statistics.generated_tokens > 0:
            self._histograms["time_to_first_token_seconds"].observe(statistics.time_to_first_token_seconds)
        if statistics.generated_tokens > 1:
            seconds = statistics.decode_seconds / (statistics.generated_tokens - 1)
            self._histograms["time_per_output_token_seconds"].observe(seconds)
