"""Admission: how many run and wait, who is turned away, and when those are told to come again."""

from __future__ import annotations

import gc
import sys
from types import FrameType

import pytest

from specd.errors import InvalidRequestError, ResourceExhaustedError
from tests.unit.crowd import Crowd, Request, settle


async def test_as_many_sessions_run_as_may_and_no_more() -> None:
    async with Crowd(max_sessions=3) as crowd:
        requests = [crowd.come() for _ in range(5)]
        await settle()
        assert crowd.running == requests[:3]
        requests[1].end()
        await settle()
        assert crowd.running == [requests[0], requests[2], requests[3]]


async def test_sessions_fill_the_tokens_to_the_last_and_no_further() -> None:
    async with Crowd(capacity=10) as crowd:
        crowd.come(6)
        fits, too_much = crowd.come(4), crowd.come(1)
        await settle()
        assert fits in crowd.running
        assert crowd.waiting == [too_much]
        assert crowd.admission.capacities.reserved_bytes == 10


async def test_those_that_have_not_asked_yet_count_as_queued() -> None:
    async with Crowd(max_sessions=1, max_queued=1) as crowd:
        coming = crowd.come(None)
        crowd.come(None)
        refused = crowd.come(None)
        await settle()
        assert crowd.admission.num_queued == 2
        assert refused.reason == "QUEUE_FULL"
        coming.ask(1)
        await settle()
        assert (crowd.admission.num_running, crowd.admission.num_queued) == (1, 1)


async def test_a_request_that_leaves_without_asking_lets_another_come() -> None:
    async with Crowd(max_sessions=1, max_queued=0) as crowd:
        request = crowd.come(None)
        await settle()
        request.task.cancel()
        await settle()
        request = crowd.come()
        await settle()
        assert crowd.running == [request]


async def test_without_a_queue_a_request_runs_or_is_turned_away() -> None:
    async with Crowd(max_sessions=2, max_queued=0) as crowd:
        first, second, refused = crowd.come(), crowd.come(), crowd.come()
        await settle()
        assert crowd.running == [first, second]
        assert refused.reason == "QUEUE_FULL"
        assert refused.retry_after_seconds > 0
        assert crowd.admission.num_queued == 0
        first.end()
        await settle()
        third = crowd.come()
        await settle()
        assert crowd.running == [second, third]


async def test_a_refusal_says_how_many_run_and_wait() -> None:
    async with Crowd(max_sessions=2, max_queued=3) as crowd:
        *_, refused = (crowd.come() for _ in range(6))
        await settle()
        assert "2 sessions run and 3 requests wait" in str(refused.refusal)


async def test_turning_away_takes_no_longer_when_thousands_wait() -> None:
    async def count_calls(max_queued: int) -> int:
        """Count the function calls in which a request is turned away. It does not wait, or `send` would return."""
        num_calls = 0

        def count(frame: FrameType, event: str, argument: object) -> None:
            nonlocal num_calls
            num_calls += event in {"call", "c_call"}

        async def be_turned_away() -> None:
            with crowd.admission.place(""):
                raise AssertionError("it found a place")

        async with Crowd(max_queued=max_queued) as crowd:
            for _ in range(crowd.max_sessions + max_queued):
                crowd.come()
            await settle()
            assert crowd.admission.num_queued == max_queued
            coroutine = be_turned_away()
            gc.disable()  # whose callbacks would count
            sys.setprofile(count)
            try:
                coroutine.send(None)
            except ResourceExhaustedError as error:
                assert error.reason == "QUEUE_FULL"
            finally:
                sys.setprofile(None)
                gc.enable()
            assert crowd.admission.num_queued == max_queued
        return num_calls

    assert await count_calls(1) == await count_calls(5000) > 0


async def run_for(crowd: Crowd, seconds: float) -> None:
    request = crowd.come()
    await settle()
    crowd.clock.now += seconds
    request.end()
    await settle()


async def come_in_vain(crowd: Crowd) -> Request:
    """Fill the queue, and come once more."""
    for _ in range(crowd.max_sessions + crowd.max_queued - len(crowd.present)):
        crowd.come()
    refused = crowd.come()
    await settle()
    assert refused.reason == "QUEUE_FULL"
    return refused


async def test_who_is_turned_away_is_told_to_come_when_those_that_wait_have_begun() -> None:
    told = []
    for max_queued in range(5):
        async with Crowd(max_sessions=1, max_queued=max_queued) as crowd:
            for _ in range(3):
                await run_for(crowd, seconds=2)
            told.append((await come_in_vain(crowd)).retry_after_seconds)
    assert told == pytest.approx([2, 4, 6, 8, 10])


@pytest.mark.parametrize(("seconds", "told"), [(0, 0.1), (0.001, 0.1), (1000, 60)])
async def test_who_is_turned_away_is_never_told_to_come_at_once_or_much_later(seconds: float, told: float) -> None:
    async with Crowd(max_sessions=1, max_queued=3) as crowd:
        for _ in range(3):
            await run_for(crowd, seconds)
        assert (await come_in_vain(crowd)).retry_after_seconds == told


async def test_who_is_turned_away_before_any_session_has_ended_is_told_a_time_too() -> None:
    async with Crowd(max_sessions=1, max_queued=3) as crowd:
        assert (await come_in_vain(crowd)).retry_after_seconds > 0


async def test_when_sessions_become_longer_the_time_told_follows() -> None:
    async with Crowd(max_sessions=1, max_queued=0) as crowd:
        told = []
        for seconds in [1.0] * 5 + [3.0] * 30:
            await run_for(crowd, seconds)
            refused = await come_in_vain(crowd)
            told.append(refused.retry_after_seconds)
            crowd.running[0].end()
            await settle()
        assert told[0] < told[6] < told[10] < told[-1]


async def test_time_in_which_nobody_was_there_does_not_make_the_time_told_longer() -> None:
    async with Crowd(max_sessions=1, max_queued=1) as crowd:
        for _ in range(3):
            await run_for(crowd, seconds=2)
            crowd.clock.now += 3600
        assert (await come_in_vain(crowd)).retry_after_seconds == pytest.approx(4)


async def test_waiters_that_give_up_do_not_count_as_sessions_that_ended() -> None:
    async with Crowd(max_sessions=1, max_queued=20) as crowd:
        for _ in range(3):
            await run_for(crowd, seconds=2)
        first = crowd.come()
        others = [crowd.come() for _ in range(20)]
        await settle()
        crowd.clock.now += 2
        first.end()  # so that they give up when they are about to run
        for other in others:
            other.task.cancel()
        await settle()
        assert crowd.present == []
        assert (await come_in_vain(crowd)).retry_after_seconds == pytest.approx(42)


async def test_a_request_that_never_fits_is_refused_and_leaves_no_trace() -> None:
    async with Crowd(capacity=10) as crowd:
        first, refused, other = crowd.come(10), crowd.come(11), crowd.come(10)
        await settle()
        assert isinstance(refused.refusal, InvalidRequestError)
        assert refused.reason == "CACHE_EXCEEDED"
        assert "11 tokens" in str(refused.refusal)
        assert "room for 10" in str(refused.refusal)
        assert crowd.running == [first]
        assert crowd.waiting == [other]


async def test_when_the_capacity_shrinks_who_cannot_fit_any_more_is_refused_and_others_run() -> None:
    async with Crowd(capacity=10) as crowd:
        first, large, small = crowd.come(6), crowd.come(8), crowd.come(1)
        await settle()
        crowd.capacity = 5
        first.end()
        await settle()
        assert large.reason == "CACHE_EXCEEDED"
        assert "8 tokens, which take 8 bytes, but the target worker's cache has room for 5" in str(large.refusal)
        assert crowd.running == [small]
        refused = crowd.come(6)
        await settle()
        assert refused.reason == "CACHE_EXCEEDED"


async def test_clients_whose_requests_no_longer_fit_do_not_keep_the_machine_idle() -> None:
    async with Crowd(capacity=1000) as crowd:
        first = crowd.come(900, client="a")
        await settle()
        others = [crowd.come(800, client="b"), crowd.come(800, client="c")]
        fits = crowd.come(500, client="c")
        await settle()
        crowd.capacity = 500
        first.end()
        await settle()
        assert [other.reason for other in others] == ["CACHE_EXCEEDED"] * 2
        assert crowd.running == [fits]


async def test_a_review_notices_other_memory_when_no_client_does_anything() -> None:
    async with Crowd(capacity=10) as crowd:
        crowd.come(6)
        large, small = crowd.come(5), crowd.come(2)
        await settle()
        crowd.capacity = 12
        crowd.admission.review()
        await settle()
        assert crowd.waiting == [small]
        crowd.bytes_per_token = 6  # the worker is back without --kv-bits
        crowd.capacity = 11
        crowd.admission.review()
        await settle()
        assert (small.reason, crowd.waiting) == ("CACHE_EXCEEDED", [])
        assert large in crowd.running
        crowd.bytes_per_token = 1


async def test_when_the_capacity_shrinks_nobody_begins_until_enough_have_left() -> None:
    async with Crowd(capacity=10) as crowd:
        first, second, waiting = crowd.come(5), crowd.come(5), crowd.come(2)
        await settle()
        crowd.capacity = 6
        first.end()
        await settle()
        assert crowd.running == [second]
        second.end()
        await settle()
        assert crowd.running == [waiting]


async def test_capacity_that_has_grown_is_used_from_the_next_request_on() -> None:
    async with Crowd(capacity=10) as crowd:
        requests = [crowd.come(8), crowd.come(8)]
        await settle()
        crowd.capacity = 20
        requests.append(crowd.come(4))
        await settle()
        assert {*crowd.running} == {*requests}
