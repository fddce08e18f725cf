"""Several streams in one call: each is served as a call by itself, for any faults of the others and of the peer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.workers.multiplexer import Multiplexer
from specd.errors import InvalidRequestError, UnavailableError, error_info, to_status
from specd.rpc.access import anyone
from specd.rpc.messages import INCARNATION
from specd.rpc.multiplex_service import MultiplexService
from specd.rpc.refusals import refusing_server
from specd.v1 import multiplex_pb2_grpc
from specd.v1.multiplex_pb2 import Frame, MultiplexRequest
from specd.v1.target_pb2 import VerifyRequest, VerifyResponse

LIFE = "0123"
SECONDS = 20.0


@dataclass
class Worker:
    """A server in this process."""

    server: grpc.aio.Server
    address: str = ""


@asynccontextmanager
async def serving(servicer: Any, server: grpc.aio.Server | None = None) -> AsyncIterator[Worker]:
    worker = Worker(server or grpc.aio.server())
    multiplex_pb2_grpc.add_MultiplexServiceServicer_to_server(servicer, worker.server)
    worker.address = f"127.0.0.1:{worker.server.add_insecure_port('127.0.0.1:0')}"
    await worker.server.start()
    try:
        yield worker
    finally:
        await worker.server.stop(None)


@asynccontextmanager
async def multiplexer_of(
    serve: Callable[[Any], Awaitable[None]],
) -> AsyncIterator[tuple[Callable[[], Multiplexer], Worker]]:
    """Run a server that serves its sessions by `serve`; yields what makes a call to it."""

    async with (
        serving(MultiplexService(lambda: LIFE, serve, VerifyRequest.FromString)) as worker,
        grpc.aio.insecure_channel(worker.address) as channel,
    ):
        yield lambda: Multiplexer(channel, VerifyResponse.FromString), worker


async def echo(context: Any) -> None:
    """Answer each request with its round, and as much as it asks for."""
    while (request := await context.read()) is not grpc.aio.EOF:
        await context.write(VerifyResponse(round=request.round, cached_len=len(request.token_ids)))


@dataclass(frozen=True)
class Script:
    """A session: the lengths of its requests, and its end."""

    lengths: list[int]
    end: str


scripts = st.builds(
    Script,
    st.lists(st.integers(1, 60_000), max_size=6),
    st.sampled_from(["eof", "refused", "failed", "cancelled", "broken"]),
)


async def play(multiplexer: Multiplexer, script: Script, number: int) -> None:
    """Hold a session, and check everything that it hears."""
    call = multiplexer.open(f"{number} {script.end}")
    for round_, length in enumerate(script.lengths, 1):
        await call.write(VerifyRequest(round=round_ + 1000 * number, token_ids=[number] * length))
        answer = await call.read()
        assert (answer.round, answer.cached_len) == (round_ + 1000 * number, length)
    assert (await call.initial_metadata())[INCARNATION] == LIFE
    if script.end == "eof":
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
    elif script.end == "cancelled":
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.read()
    else:
        await (call.write(VerifyRequest()) if script.end != "broken" else write_broken(multiplexer, call))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        code = grpc.StatusCode.INTERNAL if script.end == "failed" else grpc.StatusCode.INVALID_ARGUMENT
        assert raised.value.code() is code
        reasons = {"refused": "OUT_OF_RANGE", "broken": "BROKEN_MESSAGE", "failed": ""}
        assert error_info(raised.value).reason == reasons[script.end]
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(VerifyRequest(round=1))


async def write_broken(multiplexer: Multiplexer, call: Any) -> None:
    multiplexer.put(Frame(stream=call._number, message=b"\xff\xff"))


async def by_script(context: Any) -> None:
    """Answer, and end as the session's id says."""
    (_, session_id), *_ = context.invocation_metadata()
    try:
        while (request := await context.read()) is not grpc.aio.EOF:
            if not request.token_ids and session_id.endswith("refused"):
                await context.abort_with_status(to_status(InvalidRequestError("OUT_OF_RANGE", "refused")))
            assert request.token_ids, "the test's own failure"
            await context.write(VerifyResponse(round=request.round, cached_len=len(request.token_ids)))
    except InvalidRequestError as error:
        await context.abort_with_status(to_status(error))


@settings(deadline=None, max_examples=40)
@given(st.lists(scripts, min_size=1, max_size=8))
def test_each_stream_gets_its_own_answers_and_its_own_end(played: list[Script]) -> None:
    async def run() -> None:
        async with multiplexer_of(by_script) as (begin, _), asyncio.timeout(SECONDS):
            multiplexer = begin()
            await asyncio.gather(*(play(multiplexer, script, i) for i, script in enumerate(played)))
            assert multiplexer.has_ended

    asyncio.run(run())


def test_requests_of_one_moment_go_in_one_message_and_so_do_their_answers() -> None:
    seen: list[int] = []

    class Peer(multiplex_pb2_grpc.MultiplexServiceServicer):
        async def Multiplex(self, request_iterator: Any, context: Any) -> None:
            while (frames := await context.read()) is not grpc.aio.EOF:
                seen.append(len(frames.frames))

    async def run() -> None:
        async with serving(Peer()) as worker, grpc.aio.insecure_channel(worker.address) as channel:
            multiplexer = Multiplexer(channel, VerifyResponse.FromString)
            calls = [multiplexer.open(str(i)) for i in range(16)]
            for call in calls:
                await call.write(VerifyRequest(round=1, token_ids=[1]))
            while sum(seen) < 32:  # noqa: ASYNC110 - the server raises no event
                await asyncio.sleep(0.01)
            await calls[0].write(VerifyRequest(round=2, token_ids=[1] * 10**6))
            await calls[1].write(VerifyRequest(round=2, token_ids=[1] * 10**6))
            while sum(seen) < 34:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            for call in calls:
                call.cancel()

    asyncio.run(asyncio.wait_for(run(), SECONDS))
    assert seen[0] == 32
    assert seen[1:3] == [1, 1]  # each is a megabyte


def test_a_call_ends_with_its_last_stream_so_that_a_server_can_stop() -> None:
    async def run() -> None:
        async with multiplexer_of(echo) as (begin, worker):
            multiplexer = begin()
            first, second = multiplexer.open("a"), multiplexer.open("b")
            for call in (first, second):
                await call.write(VerifyRequest(round=1, token_ids=[1]))
                assert (await call.read()).round == 1
            await first.done_writing()
            assert await first.read() is grpc.aio.EOF
            assert not multiplexer.has_ended
            stopping = asyncio.ensure_future(worker.server.stop(1000))
            await asyncio.sleep(0.05)
            assert not stopping.done()
            await second.done_writing()
            assert await second.read() is grpc.aio.EOF
            assert multiplexer.has_ended
            await stopping

    asyncio.run(asyncio.wait_for(run(), SECONDS))


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_cancelled_session_ends_at_the_server_at_once(has_begun: bool) -> None:
    ended: list[str] = []

    async def hold(context: Any) -> None:
        try:
            await context.write(VerifyResponse(round=1))
            await asyncio.Event().wait()
        finally:
            ended.append(context.invocation_metadata()[0][1])

    async def run() -> None:
        async with multiplexer_of(hold) as (begin, _):
            multiplexer = begin()
            stays = multiplexer.open("stays")
            await stays.read()
            for i in range(3):
                call = multiplexer.open(f"goes {i}")
                if has_begun:
                    await call.read()
                call.cancel()
            other = multiplexer.open("other")
            await other.read()
            assert ended == ([f"goes {i}" for i in range(3)] if has_begun else [])
            stays.cancel()
            other.cancel()
            while len(ended) < 2 + 3 * has_begun:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), SECONDS))


def test_a_peer_that_reads_nothing_is_read_no_more() -> None:
    num_served = 0

    async def amplify(context: Any) -> None:
        nonlocal num_served
        while await context.read() is not grpc.aio.EOF:
            num_served += 1
            await context.write(BIG)

    async def run() -> None:
        async with multiplexer_of(amplify) as (_, worker), grpc.aio.insecure_channel(worker.address) as channel:
            call = multiplex_pb2_grpc.MultiplexServiceStub(channel).Multiplex()
            await call.write(MultiplexRequest(frames=[Frame(stream=1, session_id="s")]))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2):
                    for _ in range(2000):
                        request = VerifyRequest(token_ids=[1] * 50_000).SerializeToString()
                        await call.write(MultiplexRequest(frames=[Frame(stream=1, message=request)]))
                        await asyncio.sleep(0)
            call.cancel()

    asyncio.run(asyncio.wait_for(run(), SECONDS))
    assert num_served < 200


BIG = VerifyResponse(log_probabilities=[{"top_model": [{}] * 60_000}])


def test_a_worker_that_cannot_serve_yet_says_why() -> None:
    def incarnation() -> str:
        raise UnavailableError("STARTING", "still loading", retry_after_seconds=1.0)

    async def run() -> None:
        async with (
            serving(MultiplexService(incarnation, echo, VerifyRequest.FromString)) as worker,
            grpc.aio.insecure_channel(worker.address) as channel,
        ):
            call = Multiplexer(channel, VerifyResponse.FromString).open("s")
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call.read()
            assert error_info(raised.value).reason == "STARTING"

    asyncio.run(asyncio.wait_for(run(), SECONDS))


def test_a_session_that_never_ends_its_answers_waits_for_its_reader() -> None:
    num_written = 0

    async def flood(context: Any) -> None:
        nonlocal num_written
        while True:
            await context.write(BIG)
            num_written += 1

    async def run() -> None:
        async with multiplexer_of(flood) as (_, worker), grpc.aio.insecure_channel(worker.address) as channel:
            call = multiplex_pb2_grpc.MultiplexServiceStub(channel).Multiplex()
            await call.write(MultiplexRequest(frames=[Frame(stream=1, session_id="s")]))
            await asyncio.sleep(1)
            call.cancel()

    asyncio.run(asyncio.wait_for(run(), SECONDS))
    assert num_written < 400


def test_a_request_that_cannot_be_parsed_ends_the_call_with_its_reason() -> None:
    """The server checks requests as those of specd do: specd/rpc/refusals.py."""

    async def run() -> None:
        service = MultiplexService(lambda: LIFE, echo, VerifyRequest.FromString)
        async with (
            serving(service, refusing_server([], anyone)) as worker,
            grpc.aio.insecure_channel(worker.address) as channel,
        ):
            method: Any = channel.stream_stream("/specd.v1.MultiplexService/Multiplex")
            call = method()
            await call.write(MultiplexRequest(frames=[Frame(stream=1, session_id="s")]).SerializeToString())
            await call.initial_metadata()
            await call.write(b"\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                while True:  # the status of its stream can come before
                    assert await call.read() is not grpc.aio.EOF
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error_info(raised.value).reason == "BROKEN_MESSAGE"

    asyncio.run(asyncio.wait_for(run(), SECONDS))
