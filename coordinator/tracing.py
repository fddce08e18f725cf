"""OpenTelemetry spans of sessions and their rounds: a module that needs specd[tracing].

Spans are made from what a round says of itself once it is over, so that the round loop knows nothing of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from coordinator.round import Exchange, Round
from coordinator.statistics import SessionStatistics
from specd import __version__


class Tracing:
    """Begins the trace of each session."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def begin(self, session_id: str, arrived_at: float, traceparent: str) -> SessionTrace:
        """Begin the trace of a session, as part of the caller's if that sent a W3C `traceparent`."""
        return SessionTrace(self._tracer, session_id, arrived_at, traceparent)


class SessionTrace:
    """A span for a session, in it one for each round, and in that those of its propose and verify.

    Times are those of time.perf_counter, as in rounds.
    """

    def __init__(self, tracer: Tracer, session_id: str, arrived_at: float, traceparent: str) -> None:
        self._tracer = tracer
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()
        self._session = tracer.start_span(
            "session",
            TraceContextTextMapPropagator().extract({"traceparent": traceparent}),
            SpanKind.SERVER,
            {"specd.session_id": session_id},
            start_time=self._ns(arrived_at),
        )

    def add(self, round_: Round) -> None:
        """Add a round that is over."""
        proposal = round_.proposal
        attributes: dict[str, str | int | float] = {
            "specd.proposed_tokens": round_.num_proposed,
            "specd.accepted_tokens": round_.commit.num_accepted,
            "specd.was_ahead": proposal.was_ahead,
        }
        if proposal.fault:
            attributes["specd.draft_fault"] = proposal.fault
        span = self._start("round", self._session, round_.started_at, attributes)
        self._add_exchange("propose", span, proposal.exchange)
        self._add_exchange("verify", span, round_.verdict.exchange)
        span.end(self._ns(round_.ended_at))

    def end(self, statistics: SessionStatistics, outcome: str) -> None:
        """End the session now: with its finish reason, "cancelled" or "failed"."""
        self._session.set_attributes(
            {
                "specd.outcome": outcome,
                "specd.prompt_tokens": statistics.prompt_tokens,
                "specd.generated_tokens": statistics.generated_tokens,
                "specd.rounds": statistics.rounds,
                "specd.admission_seconds": statistics.admission_seconds,
                "specd.time_to_first_token_seconds": statistics.time_to_first_token_seconds,
                "specd.target_replays": statistics.target_replays,
            }
        )
        if outcome == "failed":
            self._session.set_status(StatusCode.ERROR)
        self._session.end(self._ns(time.perf_counter()))

    def _add_exchange(self, name: str, parent: Span, exchange: Exchange) -> None:
        if exchange.sent_at == 0:
            return  # the worker was not asked, or what it said was there already
        attributes: dict[str, str | int | float] = {
            "specd.queue_seconds": exchange.queue_seconds,
            "specd.compute_seconds": exchange.compute_seconds,
            "specd.num_sessions": exchange.num_sessions,
            "specd.step_tokens": exchange.step_tokens,
        }
        span = self._start(name, parent, exchange.sent_at, attributes)
        span.end(self._ns(exchange.sent_at + exchange.seconds))

    def _start(self, name: str, parent: Span, started_at: float, attributes: dict[str, str | int | float]) -> Span:
        return self._tracer.start_span(
            name, set_span_in_context(parent), attributes=attributes, start_time=self._ns(started_at)
        )

    def _ns(self, at: float) -> int:
        return self._epoch_ns + int(at * 1e9)


@contextmanager
def open_tracing(endpoint: str) -> Iterator[Tracing]:
    """Send spans to an OTLP endpoint over gRPC, such as http://localhost:4317.

    The rest, from sampling to headers, is up to OpenTelemetry's own OTEL_* variables.
    """
    ours = Resource({SERVICE_NAME: "specd-coordinator", SERVICE_VERSION: __version__})
    provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    try:
        yield Tracing(provider.get_tracer("specd", __version__))
    finally:
        provider.shutdown()  # sends what is left
