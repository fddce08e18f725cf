"""A session's stream to a worker: for any order of requests, the answer is that of a fresh cache."""

from __future__ import annotations

import grpc
import pytest

from specd.errors import error_info
from tests.e2e.calls import Worker
from tests.e2e.processes import eventually

pytestmark = pytest.mark.usefixtures("unharmed")


async def test_a_position_beyond_the_cache_is_refused_with_the_length_of_the_cache(
    worker: Worker, token_ids: list[int]
) -> None:
    stream = worker.open_stream()
    answer = await stream.ask(token_ids[:10])
    await stream.send(token_ids[20:], position=20)
    error = await stream.error()

    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert error_info(error).reason == "CACHE_TOO_SHORT"
    assert dict(error_info(error).metadata) == {"cached_len": str(answer.cached_len)}
    assert "position is 20" in (error.details() or "")


async def test_a_new_stream_holds_nothing(worker: Worker, token_ids: list[int]) -> None:
    stream = worker.open_stream()
    await stream.send(token_ids[1:], position=1)
    error = await stream.error()

    assert error_info(error).reason == "CACHE_TOO_SHORT"
    assert error_info(error).metadata["cached_len"] == "0"


@pytest.mark.parametrize("same_start", [True, False], ids=["same start", "another start"])
async def test_a_newer_request_supersedes_the_older(worker: Worker, token_ids: list[int], same_start: bool) -> None:
    long = token_ids * 30
    newer = long[:600] if same_start else token_ids[7:20]
    expected = await worker.ask_on_a_new_stream(newer)
    superseded_before = worker.superseded_requests()

    stream = worker.open_stream()
    await stream.send(long, round_=1)
    await stream.send(newer, round_=2)
    await stream.call.done_writing()
    answer = await stream.receive()

    assert answer.round == 2
    answer.round = expected.round
    assert answer == expected
    assert await stream.receive() is grpc.aio.EOF
    assert worker.superseded_requests() == superseded_before + 1


async def test_the_same_request_gets_the_same_answer(worker: Worker, token_ids: list[int]) -> None:
    stream = worker.open_stream()
    await stream.ask(token_ids[:20])
    first = await stream.ask(token_ids[20:30], position=20)
    again = await stream.ask(token_ids[20:30], position=20)

    assert first == again == await worker.ask_on_a_new_stream(token_ids[:30])
    stream.call.cancel()


async def test_after_a_rewind_answers_are_those_of_a_fresh_cache(worker: Worker, token_ids: list[int]) -> None:
    stream = worker.open_stream()
    await stream.ask(token_ids)
    # Backwards, then forwards again to where the cache ends now, then onto tokens that it never held.
    for position in (63, 50, 33, 17, 1, 0, 5, 8):
        rest = token_ids[position : position + 5]
        assert await stream.ask(rest, position=position) == await worker.ask_on_a_new_stream(
            token_ids[:position] + rest
        )
    other = token_ids[40:50]
    assert await stream.ask(other, position=6) == await worker.ask_on_a_new_stream(token_ids[:6] + other)
    stream.call.cancel()


async def test_a_half_closed_stream_still_gets_its_answer(worker: Worker, token_ids: list[int]) -> None:
    stream = worker.open_stream()
    await stream.send(token_ids)
    await stream.call.done_writing()

    assert await stream.receive() == await worker.ask_on_a_new_stream(token_ids)
    assert await stream.receive() is grpc.aio.EOF
    assert await stream.call.code() is grpc.StatusCode.OK


async def test_a_stream_without_a_request_ends_well(worker: Worker) -> None:
    stream = worker.open_stream()
    await stream.call.done_writing()
    assert await stream.receive() is grpc.aio.EOF
    assert await stream.call.code() is grpc.StatusCode.OK


async def test_dropped_streams_leave_no_session(worker: Worker, token_ids: list[int]) -> None:
    streams = [worker.open_stream() for _ in range(40)]
    for stream in streams:
        await stream.send(token_ids[:4])
    for stream in streams[:20]:
        await stream.receive()
    await eventually(lambda: worker.active_sessions() == len(streams))

    for stream in streams:
        stream.call.cancel()  # half of them with a request under way
