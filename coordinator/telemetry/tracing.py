"""OpenTelemetry spans of sessions and their rounds; needs specd[tracing].

Spans are created from finished rounds, so the round loop does not depend on them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from coordinator.core import Exchange, Round
from coordinator.telemetry.statistics import SessionStatistics
from specd.version import __version__

# Takes a session id, its arrival by time.perf_counter, and the caller's traceparent or "".
BeginTrace: TypeAlias = "Callable[[str, float, str], SessionTrace]"

_SESSION_ATTRIBUTES = (
    "prompt_tokens",
    "generated_tokens",
    "rounds",
    "admission_seconds",
    "time_to_first_token_seconds",
    "target_replays",
)
_EXCHANGE_ATTRIBUTES = ("queue_seconds", "compute_seconds", "num_sessions", "step_tokens")


class SessionTrace:
    """A span for a session, with a span for each round, which has spans for its propose and verify.

    It is part of the caller's trace if the caller has sent a W3C `traceparent`. Times are from time.perf_counter, as in
    rounds.
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
        """Add a finished round."""
        attributes: dict[str, str | int | float] = {
            "specd.proposed_tokens": round_.num_proposed,
            "specd.accepted_tokens": round_.commit.num_accepted,
        }
        drafted = round_.proposal.drafted
        if drafted.fault:
            attributes["specd.draft_fault"] = drafted.fault
        span = self._start("round", self._session, round_.started_at, attributes)
        self._add_exchange("propose", span, drafted.exchange)
        self._add_exchange("verify", span, round_.verdict.exchange)
        span.end(self._ns(round_.ended_at))

    def end(self, statistics: SessionStatistics, outcome: str) -> None:
        """End the session now: with its finish reason, "cancelled" or "failed"."""
        self._session.set_attribute("specd.outcome", outcome)
        for name in _SESSION_ATTRIBUTES:
            self._session.set_attribute(f"specd.{name}", getattr(statistics, name))
        if outcome == "failed":
            self._session.set_status(StatusCode.ERROR)
        self._session.end(self._ns(time.perf_counter()))

    def _add_exchange(self, name: str, parent: Span, exchange: Exchange) -> None:
        if exchange.sent_at:  # otherwise the worker got no request
            attributes = {f"specd.{attribute}": getattr(exchange, attribute) for attribute in _EXCHANGE_ATTRIBUTES}
            span = self._start(name, parent, exchange.sent_at, attributes)
            span.end(self._ns(exchange.sent_at + exchange.seconds))

    def _start(self, name: str, parent: Span, started_at: float, attributes: dict[str, str | int | float]) -> Span:
        context = set_span_in_context(parent)
        return self._tracer.start_span(name, context, attributes=attributes, start_time=self._ns(started_at))

    def _ns(self, at: float) -> int:
        return self._epoch_ns + int(at * 1e9)


@contextmanager
def open_tracing(endpoint: str) -> Iterator[BeginTrace]:
    """Send spans to an OTLP endpoint over gRPC, such as http://localhost:4317.

    OpenTelemetry's own OTEL_* variables set the rest, from sampling to headers.
    """
    ours = Resource({SERVICE_NAME: "specd-coordinator", SERVICE_VERSION: __version__})
    provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    try:
        yield partial(SessionTrace, provider.get_tracer("specd", __version__))
    finally:
        provider.shutdown()  # sends the remaining spans
