"""A stream to a worker that says anything: times, lives, answers to nothing, and errors in any form."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from coordinator.core import Commit, Exchange, Round, SessionSetup, Verdict
from coordinator.planner.planner import Planner
from coordinator.planner.round_costs import RoundCosts
from coordinator.planner.session_planner import SessionPlanner
from coordinator.telemetry.metrics import CoordinatorMetrics
from coordinator.telemetry.statistics import SessionStatistics
from coordinator.workers.description import check_description
from coordinator.workers.errors import WorkerError, WorkerLostError
from coordinator.workers.stream import WorkerStream
from specd.cache_footprint import CacheFootprint
from specd.model_info import AdapterInfo, ModelInfo
from specd.rpc.messages import INCARNATION, step_costs_from
from specd.sampling import Sampling
from specd.step_costs import StepCosts
from specd.v1.model_pb2 import StepCost, WorkerTime
from specd.v1.target_pb2 import VerifyRequest, VerifyResponse
from specd.vocabulary import TokenSource
from tests.unit.fake_workers import drafted

LIFE = "0123"


class Call:
    """A call to a worker that answers each request with these responses, or with an error."""

    def __init__(self, *answers: VerifyResponse | Exception | None, life: str | None = LIFE, ends: bool = True) -> None:
        self.metadata = grpc.aio.Metadata(*([(INCARNATION, life)] if life is not None else []))
        self._answers = list(answers)
        self._asked = asyncio.Event()
        self._ends = ends  # when it is told that nothing more comes
        self._ended = asyncio.Event()
        self.is_cancelled = False

    async def initial_metadata(self) -> grpc.aio.Metadata:
        await self._asked.wait()
        return self.metadata

    async def write(self, request: VerifyRequest) -> None:
        if self.is_cancelled:
            raise asyncio.InvalidStateError("RPC already finished.")
        self._asked.set()

    async def read(self) -> Any:
        await self._asked.wait()
        if not self._answers:
            await self._ended.wait()
            if self.is_cancelled:
                raise asyncio.CancelledError
            return grpc.aio.EOF
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def done_writing(self) -> None:
        if self._ends:
            self._ended.set()

    def cancel(self) -> None:
        self.is_cancelled |= not self._ended.is_set()
        self._ended.set()


def stream_of(call: Any) -> WorkerStream[VerifyRequest, VerifyResponse]:
    return WorkerStream(call, SessionSetup("s", Sampling(), namespace=b""), LIFE, worker="target")


async def has_ended(stream: WorkerStream[VerifyRequest, VerifyResponse]) -> None:
    _, pending = await asyncio.wait([stream._reading], timeout=5)
    assert not pending


def ask(*answers: VerifyResponse | Exception, life: str | None = LIFE) -> tuple[VerifyResponse, Exchange]:
    """Send a request on a new stream, and return its answer."""

    async def exchange() -> tuple[VerifyResponse, Exchange]:
        stream = stream_of(Call(*answers, life=life))
        try:
            await stream._send(VerifyRequest(token_ids=[1]), 5.0)
            return await stream._receive(5.0)
        finally:
            stream.close()
            await has_ended(stream)

    return asyncio.run(exchange())


def status(code: grpc.StatusCode, details: str = "", trailing: Sequence[tuple[str, Any]] = ()) -> Exception:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


seconds = st.floats(allow_nan=True, allow_infinity=True)
counts = st.integers(0, 2**32 - 1)
worker_times = st.builds(
    WorkerTime, queue_seconds=seconds, compute_seconds=seconds, num_sessions=counts, step_tokens=counts
)


@given(worker_times, worker_times)
@example(WorkerTime(), WorkerTime(queue_seconds=1.0, compute_seconds=sys.float_info.min))  # nothing is left, or less
def test_times_that_cannot_be_leave_statistics_metrics_and_planner_whole(first: WorkerTime, second: WorkerTime) -> None:
    exchanges = []
    for time in (first, second):
        _, exchange = ask(VerifyResponse(round=1, time=time))
        parts = exchange.queue_seconds, exchange.compute_seconds, exchange.wire_seconds
        assert all(0 <= part < 60 for part in parts)
        exchanges.append(exchange)

    costs = StepCosts({1: {1: 0.01, 5: 0.02}, 4: {1: 0.02, 5: 0.03}})
    planner = Planner(RoundCosts(lambda: costs, lambda: costs))
    registry = CollectorRegistry()
    metrics, statistics = CoordinatorMetrics(registry), SessionStatistics(1)
    sessions = [SessionPlanner(planner, Sampling(), client="") for _ in range(2)]
    for i in range(20):
        session = sessions[i % 2]
        plan = session.plan()
        proposal = drafted([1] * max(plan.limit(TokenSource.DRAFT), 1), exchange=exchanges[0])
        started_at = exchanges[0].seconds + exchanges[1].seconds
        round_ = Round(proposal, Verdict(0, 1, exchange=exchanges[1]), Commit([1], 0, recovered=True), 0.0, started_at)
        session.observe(plan, round_)
        metrics.count_round(round_, first=False)
        statistics.add(round_, arrived_at=0.0)
    samples = [sample for family in registry.collect() for sample in family.samples]
    assert all(sample.value >= -1e-9 for sample in samples)  # a NaN is not
    assert all(value >= -1e-9 for value in statistics.round_averages.values())
    assert all(0 < planner.costs.seconds(n, k) < math.inf for n in (1, 2) for k in (0, 3))


@pytest.mark.parametrize("life", ["4567", "", None])
def test_an_answer_of_another_life_is_a_lost_stream(life: str | None) -> None:
    with pytest.raises(WorkerLostError) as error:
        ask(VerifyResponse(round=1, next_token_id=3), life=life)
    assert error.value.reason == "TARGET_REPLACED"


def test_an_error_of_another_life_is_a_lost_stream_too() -> None:
    """Its model may refuse what the one that was checked would not."""
    with pytest.raises(WorkerLostError):
        ask(status(grpc.StatusCode.INVALID_ARGUMENT), life="4567")
    with pytest.raises(WorkerError) as error:
        ask(status(grpc.StatusCode.INVALID_ARGUMENT))
    assert not isinstance(error.value, WorkerLostError)


@pytest.mark.parametrize("rounds", [(0, 0), (2,), (2**64 - 1,), (0, 1)])
def test_answers_to_nothing_end_the_stream(rounds: Sequence[int]) -> None:
    with pytest.raises(WorkerError) as error:
        ask(*(VerifyResponse(round=number) for number in rounds))
    assert error.value.reason == "TARGET_BROKEN"


@pytest.mark.parametrize("is_ended_by_worker", [True, False])
@pytest.mark.parametrize("num_answers", [0, 1])
def test_only_a_worker_at_work_has_its_call_cancelled(
    num_answers: int, is_ended_by_worker: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a worker that continues after the end of its requests."""
    monkeypatch.setattr("coordinator.workers.stream._SECONDS_TO_END", 0.01)

    async def exchange() -> None:
        call = Call(*[VerifyResponse(round=1)] * num_answers, ends=is_ended_by_worker)
        stream = stream_of(call)
        await stream._send(VerifyRequest(token_ids=[1]), 5.0)
        if num_answers:
            await stream._receive(5.0)
        stream.close()
        await has_ended(stream)
        assert call.is_cancelled == (not num_answers or not is_ended_by_worker)

    asyncio.run(exchange())


@pytest.mark.parametrize("is_asked_before", [True, False])
def test_a_stream_whose_channel_is_closed_is_lost(is_asked_before: bool) -> None:
    """Its call is cancelled, which grpc.aio reports as if the waiting task were cancelled."""

    async def exchange() -> None:
        call = Call(*[VerifyResponse(round=1)] * (not is_asked_before))
        stream = stream_of(call)
        await stream._send(VerifyRequest(token_ids=[1]), 5.0)
        if not is_asked_before:
            await stream._receive(5.0)
        call.cancel()
        with pytest.raises(WorkerLostError):
            if not is_asked_before:
                await stream._send(VerifyRequest(token_ids=[2]), 5.0)
            await stream._receive(5.0)
        await has_ended(stream)

    asyncio.run(exchange())


def test_a_worker_that_answers_and_then_breaks_has_its_call_cancelled() -> None:
    async def exchange() -> None:
        call = Call(VerifyResponse(round=1), None)
        stream = stream_of(call)
        await stream._send(VerifyRequest(token_ids=[1]), 5.0)
        await stream._receive(5.0)
        await has_ended(stream)
        stream.close()
        await asyncio.sleep(0.01)
        assert call.is_cancelled

    asyncio.run(exchange())


@pytest.mark.parametrize(
    "trailing",
    [
        (("grpc-status-details-bin", b"\xff\xff\xff"),),
        (("grpc-status-details-bin", b"\x08\x03\x12\x01x"),),  # of another code
        (("grpc-status-details-bin", b"\x08\r\x1a\x35\n\x2atype.googleapis.com/google.rpc.ErrorInfo\x12\x07\xff\xff"),),
    ],
)
def test_broken_details_of_an_error_are_an_error_without_details(trailing: Sequence[tuple[str, Any]]) -> None:
    with pytest.raises(WorkerError) as error:
        ask(status(grpc.StatusCode.INTERNAL, "why\n\x1b[31m" + "x" * 9000, trailing))
    assert error.value.reason == "TARGET_INTERNAL"
    assert len(str(error.value)) < 1000
    assert str(error.value).isprintable()


@given(st.lists(st.builds(StepCost, sessions=counts, width=counts, seconds=seconds | st.floats(1e-5, 10)), max_size=6))
def test_costs_that_cannot_be_are_refused(messages: list[StepCost]) -> None:
    try:
        costs = step_costs_from(messages)
    except ValueError:
        return
    if costs is None:
        assert not messages
        return
    found = RoundCosts(lambda: costs, lambda: costs)
    assert all(0 < found.seconds(2, k) < math.inf for k in range(33))
    costs.observe(3, 4, 0.1)


MODEL = ModelInfo("m", "llama", "f", "v", 100, 1000, (0,), "float32", "cpu")


@pytest.mark.parametrize(
    "changes",
    [
        {"vocabulary_size": 0},
        {"vocabulary_size": 2**32 - 1},
        {"context_length": 0},
        {"context_length": 2**32 - 1},
        {"eos_token_ids": tuple(range(5000))},
        {"decoder_start_token_id": 100},
        {"name": "x" * 5000},
        {"device": "cpu\nevent=forged"},
        {"whole_fingerprint": "\x1b[31m"},
        {"adapters": (AdapterInfo("a", "1"), AdapterInfo("a", "2"))},
        {"adapters": (AdapterInfo("m", "1"),)},
        {"adapters": (AdapterInfo("a", ""),)},
        {"adapters": (AdapterInfo("a\n", "1"),)},
        {"adapters": tuple(AdapterInfo(f"a{i}", "1") for i in range(2000))},
    ],
)
def test_models_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    check_description(MODEL, CacheFootprint({1: 1}), LIFE)
    with pytest.raises(ValueError, match=r"it|its|a token|answers begin"):
        check_description(ModelInfo(**{**vars(MODEL), **changes}), CacheFootprint({1: 1}), LIFE)


@pytest.mark.parametrize(
    ("footprint", "incarnation"),
    [
        (CacheFootprint({1: 2**64 - 1}), LIFE),
        (CacheFootprint(dict.fromkeys(range(5000), 1)), LIFE),
        (CacheFootprint({1: 1}, 2**63), LIFE),
        (CacheFootprint({1: 1}), ""),
    ],
)
def test_workers_that_cannot_be_are_refused(footprint: CacheFootprint, incarnation: str) -> None:
    with pytest.raises(ValueError, match=r"it|its|a token|answers begin"):
        check_description(MODEL, footprint, incarnation)
