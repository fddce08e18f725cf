"""Workers that hang or stay away and clients that stop reading, with real processes; then all counters add up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from coordinator.core import Plan, SessionSetup
from coordinator.workers.errors import WorkerLateError, WorkerLostError
from coordinator.workers.session_calls import propose_calls
from coordinator.workers.stream import GrpcDraftStream
from specd.child import Child
from specd.errors import error_info
from specd.rpc.channel import open_channel
from specd.sampling import Sampling
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.v1 import generation_pb2, generation_pb2_grpc
from specd.vocabulary import TokenSource
from tests.e2e.completions import Completion
from tests.e2e.faults import (
    ENVIRONMENT,
    MAX_TOKENS,
    Undisturbed,
    are_free,
    assert_same,
    complete,
    eventually,
    is_whole,
    kill,
    scrape,
)
from tests.e2e.processes import draft_of
from tests.raw_client import RawClient

# A timeout of the coordinator of `impatient_stack`.
TARGET_RECOVERY_SECONDS = 1.0
DRAFT_TIMEOUT_SECONDS = 0.5


@contextlib.contextmanager
def hung(child: Child) -> Iterator[None]:
    """Stop a process without ending it."""
    os.kill(child.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(child.pid, signal.SIGCONT)


@contextlib.contextmanager
def not_restarted(child: Child) -> Iterator[None]:
    """Let the supervisor's attempts to start a process again fail."""
    command = child.command
    child.command = [sys.executable, "-c", "raise SystemExit(1)"]
    try:
        yield
    finally:
        child.command = command


@pytest.fixture(scope="module")
async def impatient_stack() -> AsyncIterator[Stack]:
    """A stack whose coordinator soon gives up a worker."""
    environment = ENVIRONMENT | {
        "SPECD_COORDINATOR_TARGET_RECOVERY_SECONDS": str(TARGET_RECOVERY_SECONDS),
        "SPECD_COORDINATOR_DRAFT_TIMEOUT_SECONDS": str(DRAFT_TIMEOUT_SECONDS),
    }
    async with Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, environment=environment) as running:
        yield running


async def test_client_that_stops_reading_gets_the_same_later(
    harmed_stack: Stack, harmed_client: RawClient, prompts: list[str], undisturbed: Undisturbed
) -> None:
    expected = await undisturbed(prompts[7])
    rounds = (await complete(harmed_client, prompts[7])).statistics.rounds
    verified_before = (await scrape(harmed_stack.target))["specd_worker_requests_total{done}"]

    async def all_rounds_are_verified() -> bool:
        return (await scrape(harmed_stack.target))["specd_worker_requests_total{done}"] >= verified_before + rounds

    responses = []
    # A message or two are on the way, the others stay in the coordinator.
    small_window = [("grpc.http2.lookahead_bytes", 128), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(harmed_stack.address, small_window) as channel:
        request = generation_pb2.GenerateRequest(text=prompts[7], max_tokens=MAX_TOKENS, num_draft_tokens=4)
        async for response in generation_pb2_grpc.GenerationServiceStub(channel).Generate(request):
            responses.append(response)
            if len(responses) == 1:
                await eventually(all_rounds_are_verified)

    assert_same(Completion(responses), expected)


async def test_target_that_stays_away_is_unavailable(
    impatient_stack: Stack, prompts: list[str], undisturbed: Undisturbed
) -> None:
    stack = impatient_stack
    await eventually(lambda: is_whole(stack))

    async with RawClient(stack.address) as client:
        with not_restarted(stack.target):
            # The session that loses it, then one that begins without it.
            for on_round in (lambda number: kill(stack.target) if number == 3 else None, lambda number: None):
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    async with asyncio.timeout(TARGET_RECOVERY_SECONDS + 10):
                        await complete(client, prompts[1], on_round=on_round)
                assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
                assert error_info(raised.value).reason == "TARGET_UNAVAILABLE"
                assert retry_delay_seconds(raised.value) > 0

        await eventually(lambda: is_whole(stack))
        assert_same(await complete(client, prompts[1]), await undisturbed(prompts[1]))


def retry_delay_seconds(error: grpc.aio.AioRpcError) -> float:
    info = error_details_pb2.RetryInfo()
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    assert any(detail.Unpack(info) for detail in status.details)
    return info.retry_delay.ToTimedelta().total_seconds()


async def test_hung_draft_costs_its_timeout_and_comes_back(
    impatient_stack: Stack, prompts: list[str], undisturbed: Undisturbed
) -> None:
    stack = impatient_stack
    await eventually(lambda: is_whole(stack))
    expected = await undisturbed(prompts[2])
    late = "specd_rounds_without_draft_total{DRAFT_LATE}"
    before = await scrape(stack.coordinator)

    async with RawClient(stack.address) as client:
        with contextlib.ExitStack() as until_the_end:
            completion = await complete(
                client,
                prompts[2],
                on_round=lambda number: until_the_end.enter_context(hung(draft_of(stack))) if number == 5 else None,
            )
        assert_same(completion, expected)
        assert completion.statistics.rounds_without_draft > 0
        assert completion.statistics.draft_fault  # the last one: after 15 s, keepalive gives the connection up
        assert (await scrape(stack.coordinator))[late] > before[late]

        async def drafts_again() -> bool:
            completion = await complete(client, prompts[2])
            assert_same(completion, expected)
            return completion.statistics.accepted_tokens > 0

        await eventually(drafts_again)
    await eventually(lambda: are_free(draft_of(stack), stack.target))


async def test_hung_worker_that_takes_no_more_bytes_is_lost(harmed_stack: Stack) -> None:
    async with open_channel(draft_of(harmed_stack).facts["address"]) as channel:
        await channel.channel_ready()
        setup = SessionSetup("hung", Sampling(), namespace=b"")
        stream = GrpcDraftStream(propose_calls().open(channel, setup), setup, incarnation="")
        with hung(draft_of(harmed_stack)):
            with pytest.raises(WorkerLostError):
                while True:
                    with contextlib.suppress(WorkerLateError):
                        await stream.ask(0, [0] * 100_000, Plan({TokenSource.DRAFT: 4}), DRAFT_TIMEOUT_SECONDS)
                        await stream.answer(DRAFT_TIMEOUT_SECONDS)
            with pytest.raises(WorkerLostError):
                await stream.ask(0, [0], Plan({TokenSource.DRAFT: 4}), DRAFT_TIMEOUT_SECONDS)
            stream.close()


async def test_statistics_of_sessions_add_up_to_the_counters(
    harmed_stack: Stack, harmed_client: RawClient, prompts: list[str]
) -> None:
    before = await scrape(harmed_stack.coordinator)
    draft_tokens = (0, 1, 4, 32)
    completions = [
        await complete(harmed_client, prompt, num_draft_tokens=k)
        for prompt, k in zip(prompts, draft_tokens, strict=False)
    ]
    completions += await asyncio.gather(*(complete(harmed_client, prompt) for prompt in prompts[4:8]))

    sums = Counter[str]()
    # All but the one without draft tokens.
    sums["specd_sessions_by_draft_total{present}"] = len(completions) - 1
    for completion in completions:
        session = completion.statistics
        sums["specd_sessions_total{length}"] += 1
        sums["specd_rounds_total"] += session.rounds
        sums["specd_prompt_tokens_total"] += session.prompt_tokens
        sums["specd_generated_tokens_total"] += session.generated_tokens
        sums["specd_proposed_tokens_total"] += session.proposed_tokens
        sums["specd_accepted_tokens_total"] += session.accepted_tokens
        sums["specd_recovered_tokens_total"] += session.recovered_tokens
        sums["specd_bonus_tokens_total"] += session.bonus_tokens
        for position, accepted in enumerate(session.accepted_by_position):
            sums[f"specd_accepted_tokens_by_position_total{{{position}}}"] += accepted
        for position, proposed in enumerate(session.proposed_by_position):
            sums[f"specd_proposed_tokens_by_position_total{{{position}}}"] += proposed
        for name, counts in session.sources.items():
            sums[f"specd_proposed_tokens_by_source_total{{{name}}}"] += counts.proposed
            sums[f"specd_accepted_tokens_by_source_total{{{name}}}"] += counts.accepted
            by_round = [response.round.sources[name] for response in completion.responses]
            assert counts.proposed == sum(each.proposed for each in by_round)
            assert counts.accepted == sum(each.accepted for each in by_round)
        assert session.proposed_tokens == sum(counts.proposed for counts in session.sources.values())
        assert session.accepted_tokens == sum(counts.accepted for counts in session.sources.values())
        sums["specd_reused_prompt_tokens_total{target}"] += session.target_reused_tokens
        sums["specd_reused_prompt_tokens_total{draft}"] += session.draft_reused_tokens
        sums["specd_wire_bytes_total"] += sum(response.round.wire_bytes for response in completion.responses)
        assert session.proposed_tokens == sum(session.proposed_by_position)
        assert session.wasted_tokens == session.proposed_tokens - session.accepted_tokens
        assert session.rounds == len(completion.responses)
        assert session.proposed_tokens == sum(response.round.proposed for response in completion.responses)
        assert session.accepted_tokens == sum(response.round.accepted for response in completion.responses)
        assert session.accepted_tokens == sum(session.accepted_by_position)
        assert session.accepted_tokens == sum(token.drafted for r in completion.responses for token in r.tokens)

    async def all_sessions_are_counted() -> bool:
        # The coordinator counts a session when it has ended, which its client knows a moment earlier.
        name = "specd_sessions_total{length}"
        return (await scrape(harmed_stack.coordinator))[name] == before[name] + sums[name]

    await eventually(all_sessions_are_counted)
    after = await scrape(harmed_stack.coordinator)
    counters = [name for name in after if name.startswith("specd_") and "_total" in name]
    counted = {name: after[name] - before.get(name, 0) for name in counters}
    # Sums of times, which rounding keeps from being the same to the last digit.
    round_seconds = counted.pop("specd_round_seconds_total")
    rounds = [response.round for completion in completions for response in completion.responses[1:]]
    stages = ("draft", "verify", "queue", "wire", "coordinator")
    assert round_seconds == pytest.approx(sum(getattr(r, f"{stage}_seconds") for r in rounds for stage in stages))
    assert 0.2 < counted.pop("specd_target_only_seconds_total") / round_seconds < 10
    assert {name: count for name, count in counted.items() if count} == {name: n for name, n in sums.items() if n}
