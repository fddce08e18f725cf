"""Many sessions at once, through real processes: each gets what it gets alone, none is lost, nothing stays."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from specd.child import Child
from specd.errors import error_info
from specd.rpc.channel import open_channel
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import NO_PREFIX_CACHE, Stack
from specd.text.tokenizer import Tokenizer
from specd.v1.generation_pb2 import GenerateResponse, StopConditions
from specd.v1.sampling_pb2 import SamplingParameters
from specd.v1.target_pb2 import VerifyRequest
from specd.v1.target_pb2_grpc import TargetServiceStub
from tests.e2e.memory import lasting_growth
from tests.e2e.processes import eventually, read_metric, read_metrics, resident_mib, wait_until_idle
from tests.raw_client import RawClient
from tests.thorough import examples


@dataclass(frozen=True)
class Plan:
    """One session of a mix; `cancelled_after` is the number of messages before its cancellation, if there is one."""

    prompt_ids: tuple[int, ...]
    num_draft_tokens: int | None
    temperature: float
    seed: int
    max_tokens: int
    starts_after_seconds: float
    cancelled_after: int | None


@pytest.fixture(scope="module")
async def plain_client() -> AsyncIterator[RawClient]:
    """A client of a stack whose sessions share nothing, so that prompts are computed beside the rounds of others."""
    async with (
        Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, environment=NO_PREFIX_CACHE) as stack,
        RawClient(stack.address) as client,
    ):
        yield client


async def run(client: RawClient, plan: Plan) -> list[int]:
    await asyncio.sleep(plan.starts_after_seconds)
    token_ids: list[int] = []
    call = client.generate(
        plan.prompt_ids,
        sampling=SamplingParameters(temperature=plan.temperature, seed=plan.seed),
        num_draft_tokens=plan.num_draft_tokens,
        max_tokens=plan.max_tokens,
    )
    count = 0
    async for response in call:
        token_ids.extend(token.id for token in response.tokens)
        count += 1
        if count == plan.cancelled_after:
            call.cancel()  # type: ignore[attr-defined]
            break
    return token_ids


def make_plan(rng: random.Random, text_ids: list[int], *, longest: int) -> Plan:
    length = rng.randint(5, longest)
    start = rng.randrange(len(text_ids) - length)
    return Plan(
        prompt_ids=tuple(text_ids[start : start + length]),
        num_draft_tokens=rng.choice([None, None, *range(9)]),
        temperature=rng.choice([0.0, 0.0, 0.7, 1.0]),
        seed=rng.randrange(2**32),
        max_tokens=rng.randint(1, 40),
        starts_after_seconds=rng.random(),
        cancelled_after=rng.randint(1, 8) if rng.random() < 0.25 else None,
    )


@pytest.mark.parametrize(("seed", "most"), examples([(0, 10), (0, 15), (1, 15)], 1))
async def test_any_mix_of_sessions_gives_each_what_it_gets_alone(
    plain_client: RawClient, tokenizer: Tokenizer, prompts: list[str], seed: int, most: int
) -> None:
    rng = random.Random(seed)
    text_ids = tokenizer.encode("\n".join(prompts))
    plans = [make_plan(rng, text_ids, longest=300) for _ in range(rng.randint(1, most))]
    plans.append(make_plan(rng, text_ids, longest=1900))
    together = await asyncio.gather(*(run(plain_client, plan) for plan in plans))
    for plan, token_ids in zip(plans, together, strict=True):
        undisturbed = replace(plan, num_draft_tokens=0, starts_after_seconds=0.0, cancelled_after=None)
        alone = await run(plain_client, undisturbed)
        assert token_ids == alone[: len(token_ids)], plan
        if plan.cancelled_after is None:
            assert len(token_ids) == len(alone)


async def test_rounds_go_on_while_a_long_prompt_is_computed(
    plain_client: RawClient, tokenizer: Tokenizer, prompts: list[str]
) -> None:
    long_prompt, ended = tokenizer.encode("\n".join(prompts))[:1900], asyncio.Event()
    stop = StopConditions(ignore_eos=True)
    messages_meanwhile = 0
    began = asyncio.Event()

    async def decode() -> None:
        nonlocal messages_meanwhile
        async for _ in plain_client.generate(long_prompt[:50], num_draft_tokens=2, max_tokens=1000, stop=stop):
            began.set()
            messages_meanwhile += asking.is_set()
            if ended.is_set():
                return

    asking = asyncio.Event()
    decoding = asyncio.create_task(decode())
    await began.wait()
    asking.set()
    async for _ in plain_client.generate(long_prompt, max_tokens=1):
        pass
    ended.set()
    await decoding
    # A chunk takes as long as a few rounds, and the prompt has more than ten of them.
    assert messages_meanwhile > 10


@pytest.fixture(scope="module")
async def small_stack() -> AsyncIterator[Stack]:
    """A stack on the draft alone, which is fast, with room for few sessions and with little that it keeps."""
    environment = {
        "SPECD_COORDINATOR_MAX_SESSIONS": "8",
        "SPECD_COORDINATOR_MAX_QUEUED": "4",
        "SPECD_COORDINATOR_SESSION_BUDGET_TOKENS": "2000",
        "SPECD_DRAFT_WORKER_PREFIX_CACHE_BYTES": "2MiB",
        "SPECD_TARGET_WORKER_PREFIX_CACHE_BYTES": "2MiB",
        "SPECD_TARGET_WORKER_CACHE_BYTES": "8MiB",  # 4096 tokens: 1024 bytes each, in each of two layers
    }
    async with Stack(target=EMBEDDED_DRAFT, draft=EMBEDDED_DRAFT, environment=environment) as stack:
        yield stack


@pytest.fixture
async def small_client(small_stack: Stack) -> AsyncIterator[RawClient]:
    async with RawClient(small_stack.address) as client:
        yield client


async def test_beyond_the_queue_requests_are_turned_away_and_those_in_it_run(
    small_stack: Stack, small_client: RawClient
) -> None:
    """8 run, 4 wait, and further requests get the time of their next try."""

    async def ask() -> list[int] | grpc.aio.AioRpcError:
        try:
            stop = StopConditions(ignore_eos=True)
            call = small_client.generate([1, 2, 3], max_tokens=200, num_draft_tokens=0, stop=stop)
            return [token.id async for response in call for token in response.tokens]
        except grpc.aio.AioRpcError as error:
            return error

    answers = await asyncio.gather(*(ask() for _ in range(30)))
    rejections = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
    assert len(rejections) == 18
    for error in rejections:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error_info(error).reason == "QUEUE_FULL"
        retry = error_details_pb2.RetryInfo()
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
        assert status is not None
        assert any(detail.Unpack(retry) for detail in status.details)
        assert retry.retry_delay.ToTimedelta().total_seconds() > 0
    assert len({tuple(answer) for answer in answers if isinstance(answer, list)}) == 1
    await wait_until_idle(small_stack)


async def test_no_more_sessions_run_than_their_tokens_have_room(small_stack: Stack, small_client: RawClient) -> None:
    """Five sessions of up to 2000 tokens, where there is room for 4096."""
    capacity = read_metric(small_stack.coordinator, "specd_capacity_bytes")
    assert capacity == 4096 * 2048
    most = 0.0

    async def ask() -> int:
        nonlocal most
        stop = StopConditions(ignore_eos=True)
        count = 0
        call = small_client.generate([1, 2, 3], max_tokens=1997, num_draft_tokens=8, stop=stop)
        async for response in call:
            count += len(response.tokens)
            if count > 100:
                call.cancel()  # type: ignore[attr-defined]
                break
        most = max(most, read_metric(small_stack.target, "specd_worker_cached_tokens"))
        assert read_metric(small_stack.coordinator, "specd_reserved_bytes") <= capacity
        return count

    assert all(count > 100 for count in await asyncio.gather(*(ask() for _ in range(5))))
    assert 0 < most <= capacity
    await wait_until_idle(small_stack)


async def test_a_session_waits_while_somebody_else_fills_the_target(
    small_stack: Stack, small_client: RawClient
) -> None:
    async with open_channel(small_stack.target.facts["address"]) as channel:
        foreign = [TargetServiceStub(channel).Verify() for _ in range(2)]
        for call in foreign:
            await call.write(VerifyRequest(round=1, token_ids=[5] * 2000))
            assert (await call.read()).cached_len == 2000
        refused = read_metric(small_stack.target, "specd_worker_requests_total", outcome="failed")

        async def ask() -> list[GenerateResponse]:
            stop = StopConditions(ignore_eos=True)
            return [response async for response in small_client.generate([5] * 100, max_tokens=20, stop=stop)]

        asking = asyncio.create_task(ask())
        await eventually(
            lambda: read_metric(small_stack.target, "specd_worker_requests_total", outcome="failed") > refused + 2
        )
        assert not asking.done()
        foreign[0].cancel()
        statistics = (await asking)[-1].statistics
        assert statistics.generated_tokens == 20
        assert statistics.target_replays == 0
        foreign[1].cancel()
    await wait_until_idle(small_stack)


async def test_a_session_that_never_fits_is_refused(small_client: RawClient, small_stack: Stack) -> None:
    environment = {"SPECD_TARGET_WORKER_CACHE_BYTES": "1MiB"}
    async with (
        Stack(target=EMBEDDED_DRAFT, draft="", environment=environment) as stack,
        RawClient(stack.address) as client,
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="513 tokens") as caught:
            async for _ in client.generate([1, 2, 3], max_tokens=510):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error_info(caught.value).reason == "CACHE_EXCEEDED"
        assert [r async for r in client.generate([1, 2, 3], max_tokens=5)]


def resources(child: Child) -> tuple[float, int]:
    """Return resident memory in MiB, and the number of open file descriptors."""
    return resident_mib(child.pid), len(list(Path(f"/proc/{child.pid}/fd").iterdir()))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.thorough
async def test_a_thousand_sessions_leave_nothing_behind(small_stack: Stack) -> None:
    """Ended, cancelled and rejected ones, at ten times the capacity."""
    rng = random.Random(0)

    async def ask(client: RawClient) -> None:
        prompt = [rng.randrange(5, 8000) for _ in range(rng.randint(1, 60))]
        call = client.generate(prompt, max_tokens=rng.randint(1, 12), num_draft_tokens=rng.randint(0, 4))
        if rng.random() < 0.3:
            asyncio.get_running_loop().call_later(0.3 * rng.random(), call.cancel)  # type: ignore[attr-defined]
        try:
            async for _ in call:
                pass
        except asyncio.CancelledError:
            pass
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.CANCELLED:  # as gRPC says it of a call whose answer was just coming
                return
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error.details()
            await asyncio.sleep(rng.random())
            await ask(client)

    async def ask_in_turn(count: int) -> None:
        async with RawClient(small_stack.address) as client:
            for _ in range(count):
                await ask(client)

    async def ask_all(count: int) -> list[tuple[float, int]]:
        async with asyncio.TaskGroup() as clients:
            for _ in range(50):
                clients.create_task(ask_in_turn(count // 50))
        await wait_until_idle(small_stack)
        await eventually(lambda: read_metric(small_stack.coordinator, "specd_queued_requests") == 0)
        return [resources(child) for child in small_stack.children]

    readings = [await ask_all(100) for _ in range(12)]
    for child, *of_child in zip(small_stack.children, *readings, strict=True):
        memory, files = zip(*of_child, strict=True)
        assert lasting_growth(memory) < 16, (child.name, memory)
        assert lasting_growth(files) <= 4, (child.name, files)
    samples = {sample.name: sample.value for sample in read_metrics(small_stack.coordinator) if not sample.labels}
    assert samples["specd_reserved_bytes"] == samples["specd_active_sessions"] == 0
    for worker in (small_stack.target, small_stack.draft):
        assert worker is not None
        assert read_metric(worker, "specd_worker_cached_tokens") == 0
