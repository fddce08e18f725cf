"""Spans, as an OpenTelemetry collector gets them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.v1 import generation_pb2, generation_pb2_grpc
from tests.e2e.processes import eventually, run_specd
from tests.raw_client import RawClient

TRACE_ID, CALLER_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans that it gets, by the service that they are of."""

    def __init__(self) -> None:
        self.spans: dict[str, list[trace_pb2.Span]] = defaultdict(list)

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource_spans in request.resource_spans:
            service = attributes_of(resource_spans.resource)["service.name"]
            for scope_spans in resource_spans.scope_spans:
                self.spans[service] += scope_spans.spans
        return trace_service_pb2.ExportTraceServiceResponse()


def attributes_of(message: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in message.attributes}


@pytest.fixture
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    """A collector, and its endpoint."""
    server = grpc.aio.server()
    collector = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield collector, f"http://127.0.0.1:{port}"
    await server.stop(None)


async def test_a_session_is_a_span_of_rounds_in_the_trace_of_its_caller(collector: tuple[Collector, str]) -> None:
    received, endpoint = collector
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    async with Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, environment=variables) as stack:
        async with grpc.aio.insecure_channel(stack.address) as channel:
            request = generation_pb2.GenerateRequest(text="def add(a, b):", max_tokens=20, num_draft_tokens=3)
            call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(
                request, metadata=(("traceparent", f"00-{TRACE_ID}-{CALLER_ID}-01"),)
            )
            responses = [response async for response in call]
        async with RawClient(stack.address) as client:
            alone = [response async for response in client.generate("x = 1\n", max_tokens=3, num_draft_tokens=0)]
        await eventually(lambda: sum(span.name == "session" for span in received.spans["specd-coordinator"]) == 2)

    assert list(received.spans) == ["specd-coordinator"]
    spans = received.spans["specd-coordinator"]
    children = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start_time_unix_nano):
        children[span.parent_span_id].append(span)
        assert span.start_time_unix_nano < span.end_time_unix_nano
    (session,) = children[bytes.fromhex(CALLER_ID)]
    assert {span.trace_id for span in (session, *children[session.span_id])} == {bytes.fromhex(TRACE_ID)}
    assert attributes_of(session)["specd.session_id"] == responses[0].session_id
    assert attributes_of(session)["specd.outcome"] == "length"
    assert attributes_of(session)["specd.generated_tokens"] == 20

    rounds = children[session.span_id]
    assert [span.name for span in rounds] == ["round"] * len(responses)
    for span, response in zip(rounds, responses, strict=True):
        assert attributes_of(span)["specd.proposed_tokens"] == response.round.proposed
        assert attributes_of(span)["specd.accepted_tokens"] == response.round.accepted
        asked = children[span.span_id]
        assert [child.name for child in asked] == (["propose"] if response.round.proposed else []) + ["verify"]
        times = [time for child in asked for time in (child.start_time_unix_nano, child.end_time_unix_nano)]
        assert [span.start_time_unix_nano, *times, span.end_time_unix_nano] == sorted(
            [span.start_time_unix_nano, *times, span.end_time_unix_nano]
        )
        assert attributes_of(asked[-1])["specd.compute_seconds"] == response.round.verify_seconds
        assert attributes_of(asked[-1])["specd.num_sessions"] == 1
        assert attributes_of(asked[-1])["specd.step_tokens"] >= response.round.proposed + 1  # it may be padded

    (untraced,) = children[b""]  # whose caller has no trace: it begins one
    assert attributes_of(untraced)["specd.session_id"] == alone[0].session_id
    names = [child.name for span in children[untraced.span_id] for child in children[span.span_id]]
    assert names == ["verify"] * 3


def test_an_endpoint_that_is_none_is_refused() -> None:
    done = run_specd("coordinator", "--otlp-endpoint", "localhost:4317")
    assert done.returncode == 2
    assert "write http://HOST:PORT" in " ".join(done.stderr.split())
