"""Admission: who runs, who waits and who is turned away, whatever comes, goes and is cancelled meanwhile."""

from __future__ import annotations

import asyncio
import sys
from types import FrameType, TracebackType

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.admission import Admission
from specd.errors import InvalidRequestError, ResourceExhaustedError


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Request:
    """Comes, asks for its turn, runs until it is told to end, and leaves."""

    def __init__(self, crowd: Crowd) -> None:
        self.num_tokens = 0
        self.refusal: ResourceExhaustedError | InvalidRequestError | None = None
        self._crowd = crowd
        self._asks: asyncio.Future[int] = crowd.loop.create_future()
        self._ends: asyncio.Future[None] = crowd.loop.create_future()
        self.task = crowd.loop.create_task(self._live())

    @property
    def has_asked(self) -> bool:
        return self._asks.done()

    @property
    def is_cancelled(self) -> bool:
        return self.task.cancelling() > 0

    @property
    def reason(self) -> str:
        return "" if self.refusal is None else self.refusal.reason

    @property
    def retry_after_seconds(self) -> float:
        return 0.0 if self.refusal is None else self.refusal.retry_after_seconds

    def ask(self, num_tokens: int) -> None:
        self._asks.set_result(num_tokens)

    def end(self, error: Exception | None = None) -> None:
        if self._ends.done():
            return
        if error is None:
            self._ends.set_result(None)
        else:
            self._ends.set_exception(error)

    async def _live(self) -> None:
        crowd = self._crowd
        expected_reason = "QUEUE_FULL" if len(crowd.present) >= crowd.max_sessions + crowd.max_queued else ""
        try:
            with crowd.admission.place() as place:
                crowd.present.append(self)
                try:
                    self.num_tokens = await self._asks
                    expected_reason = "CACHE_EXCEEDED" if self.num_tokens > crowd.capacity else ""
                    crowd.waiting.append(self)
                    crowd.noticed_capacity = crowd.capacity
                    await place.admit(self.num_tokens)
                    crowd.begin(self)
                    await self._ends
                finally:
                    crowd.forget(self)
        except (ResourceExhaustedError, InvalidRequestError) as error:
            self.refusal = error
        assert self.reason == expected_reason


class Crowd:
    """Requests to one Admission, the books on them kept apart, and the rules that hold at each admission."""

    def __init__(
        self,
        *,
        max_sessions: int = 4,
        max_queued: int = 1000,
        capacity: int = 10,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.max_sessions = max_sessions
        self.max_queued = max_queued
        self.capacity = capacity
        self.clock = Clock()
        self.loop = loop or asyncio.get_running_loop()
        self.admission = Admission(
            max_sessions=max_sessions, max_queued=max_queued, capacity_tokens=lambda: self.capacity, clock=self.clock
        )
        self.everyone: list[Request] = []
        self.present: list[Request] = []
        self.waiting: list[Request] = []  # in the order in which they asked
        self.running: list[Request] = []  # in the order in which they began
        self.overtaken: list[Request] = []
        self.noticed_capacity = capacity  # when somebody last asked or left

    async def __aenter__(self) -> Crowd:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for request in self.everyone:
            request.task.cancel()
        outcomes = await asyncio.gather(*(request.task for request in self.everyone), return_exceptions=True)
        if error is None:
            assert [outcome for outcome in outcomes if isinstance(outcome, AssertionError)] == []
            self.check_books()
            assert (self.admission.num_running, self.admission.num_queued, self.admission.reserved_tokens) == (0, 0, 0)

    def come(self, num_tokens: int | None = 1) -> Request:
        """Let a request come, which asks for its turn at once, or not yet."""
        request = Request(self)
        self.everyone.append(request)
        if num_tokens is not None:
            request.ask(num_tokens)
        return request

    def begin(self, request: Request) -> None:
        # One that runs as soon as it asks goes on before those that its asking admits, which are ready by now.
        self.loop.call_soon(self._note_overtaken, self.waiting[: self.waiting.index(request)])
        self.waiting.remove(request)
        assert request not in self.running
        self.running.append(request)
        assert len(self.running) <= self.max_sessions
        assert sum(one.num_tokens for one in self.running) <= self.capacity or len(self.running) == 1

    def _note_overtaken(self, ahead: list[Request]) -> None:
        self.overtaken += [one for one in ahead if one in self.waiting and not one.is_cancelled]

    def forget(self, request: Request) -> None:
        self.noticed_capacity = self.capacity
        for those in (self.present, self.waiting, self.running):
            if request in those:
                those.remove(request)

    def check_books(self) -> None:
        """Check the admission's numbers against ours, once nobody is on the way from one state to the next."""
        assert self.admission.num_running == len(self.running)
        assert self.admission.reserved_tokens == sum(request.num_tokens for request in self.running)
        assert self.admission.num_queued == len(self.present) - len(self.running)
        assert self.overtaken == []


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


# Mostly such that several run at once, and now and then one that has to wait for most of them.
token_counts = st.integers(1, 3) | st.integers(1, 12)


class AnyOrder(RuleBasedStateMachine):
    """Any order of events, several of them between two turns of the event loop or none."""

    @initialize(
        max_sessions=st.integers(1, 4),
        max_queued=st.sampled_from([0, 1, 3, 10]),
        capacity=st.integers(4, 12),
    )
    def start(self, max_sessions: int, max_queued: int, capacity: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.crowd = Crowd(max_sessions=max_sessions, max_queued=max_queued, capacity=capacity, loop=self.loop)

    def turn(self) -> None:
        """Run what is ready now, and not what that makes ready."""
        self.loop.call_soon(self.loop.stop)
        self.loop.run_forever()

    def is_there(self, *, has_asked: bool) -> bool:
        return any(request.has_asked is has_asked for request in self.crowd.present)

    @rule(num_tokens=st.none() | token_counts)
    def come(self, num_tokens: int | None) -> None:
        self.crowd.come(num_tokens)

    @precondition(lambda self: self.is_there(has_asked=False))
    @rule(data=st.data(), num_tokens=token_counts)
    def ask(self, data: st.DataObject, num_tokens: int) -> None:
        data.draw(st.sampled_from([one for one in self.crowd.present if not one.has_asked])).ask(num_tokens)

    @precondition(lambda self: self.crowd.running)
    @rule(data=st.data(), fails=st.booleans())
    def end(self, data: st.DataObject, fails: bool) -> None:
        data.draw(st.sampled_from(self.crowd.running)).end(RuntimeError("it failed") if fails else None)

    @precondition(lambda self: self.crowd.present)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.crowd.present)).task.cancel()

    @precondition(lambda self: self.crowd.waiting)
    @rule(data=st.data(), num_turns=st.integers(0, 2))
    def end_one_and_cancel_the_next(self, data: st.DataObject, num_turns: int) -> None:
        self.settle()
        if self.crowd.running and self.crowd.waiting:
            next_one = self.crowd.waiting[0]
            data.draw(st.sampled_from(self.crowd.running)).end()
            for _ in range(num_turns):
                self.turn()
            next_one.task.cancel()

    @rule(capacity=st.integers(1, 12))
    def change_the_capacity(self, capacity: int) -> None:
        self.settle()
        self.crowd.capacity = capacity

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.crowd.clock.now += seconds

    @rule()
    def let_the_loop_turn(self) -> None:
        self.turn()

    @rule()
    def settle(self) -> None:
        for _ in range(2 * len(self.crowd.everyone) + 4):
            self.turn()
        self.crowd.check_books()
        if self.crowd.waiting:
            reserved = sum(one.num_tokens for one in self.crowd.running)
            is_full = len(self.crowd.running) == self.crowd.max_sessions
            assert self.crowd.running, "nobody runs, and somebody waits"
            assert is_full or reserved + self.crowd.waiting[0].num_tokens > self.crowd.noticed_capacity, "there is room"

    @invariant()
    def the_limits_hold(self) -> None:
        admission = self.crowd.admission
        assert len(self.crowd.running) <= admission.num_running <= self.crowd.max_sessions
        assert admission.num_queued >= 0
        assert admission.num_running + admission.num_queued <= self.crowd.max_sessions + self.crowd.max_queued
        assert admission.reserved_tokens >= sum(request.num_tokens for request in self.crowd.running)
        assert (admission.reserved_tokens == 0) is (admission.num_running == 0)

    def teardown(self) -> None:
        if not hasattr(self, "crowd"):
            return
        try:
            self.settle()
            for _ in range(len(self.crowd.everyone) + 1):
                for request in self.crowd.present:
                    if not request.has_asked:
                        request.ask(1)
                    request.end()
                self.settle()
            assert self.crowd.present == []
            for request in self.crowd.everyone:
                assert request.task.done()
                if not request.task.cancelled() and (error := request.task.exception()) is not None:
                    assert str(error) == "it failed"
                if request.reason == "QUEUE_FULL":
                    assert 0 < request.retry_after_seconds <= 60
        finally:
            for request in self.crowd.everyone:
                request.task.cancel()
            self.loop.run_until_complete(
                asyncio.gather(*(request.task for request in self.crowd.everyone), return_exceptions=True)
                if self.crowd.everyone
                else asyncio.sleep(0)
            )
            self.loop.close()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=200, stateful_step_count=40)


async def test_requests_run_in_the_order_in_which_they_ask() -> None:
    async with Crowd(max_sessions=1) as crowd:
        late = crowd.come(None)
        requests = [crowd.come() for _ in range(5)]
        await settle()
        late.ask(1)
        for request in [*requests, late]:
            await settle()
            assert crowd.running == [request]
            request.end()


async def test_a_large_request_is_not_overtaken_by_small_ones() -> None:
    async with Crowd(capacity=10) as crowd:
        first, large, small = crowd.come(6), crowd.come(8), crowd.come(1)
        await settle()
        assert crowd.running == [first]
        assert crowd.waiting == [large, small]
        first.end()
        await settle()
        assert crowd.running == [large, small]


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
        assert crowd.admission.reserved_tokens == 10


async def test_one_that_ends_can_make_room_for_several() -> None:
    async with Crowd(capacity=10) as crowd:
        first, *others = crowd.come(10), crowd.come(3), crowd.come(3), crowd.come(3), crowd.come(3)
        await settle()
        first.end()
        await settle()
        assert crowd.running == others[:3]


async def test_a_session_that_fails_gives_its_room_back() -> None:
    async with Crowd(capacity=10) as crowd:
        first, second = crowd.come(10), crowd.come(10)
        await settle()
        first.end(RuntimeError("it failed"))
        with pytest.raises(RuntimeError, match="it failed"):
            await first.task
        await settle()
        assert crowd.running == [second]


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
            with crowd.admission.place():
                raise AssertionError("it found a place")

        async with Crowd(max_queued=max_queued) as crowd:
            for _ in range(crowd.max_sessions + max_queued):
                crowd.come()
            await settle()
            assert crowd.admission.num_queued == max_queued
            coroutine = be_turned_away()
            sys.setprofile(count)
            try:
                coroutine.send(None)
            except ResourceExhaustedError as error:
                assert error.reason == "QUEUE_FULL"
            finally:
                sys.setprofile(None)
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


async def test_when_the_capacity_shrinks_below_one_session_one_still_runs() -> None:
    async with Crowd(capacity=10) as crowd:
        first, large, small = crowd.come(6), crowd.come(8), crowd.come(1)
        await settle()
        crowd.capacity = 5
        first.end()
        await settle()
        assert crowd.running == [large]
        refused = crowd.come(6)
        await settle()
        assert refused.reason == "CACHE_EXCEEDED"
        large.end()
        await settle()
        assert crowd.running == [small]


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


async def test_a_waiter_that_is_cancelled_does_not_block_those_behind_it() -> None:
    async with Crowd(capacity=10) as crowd:
        first, large, small = crowd.come(6), crowd.come(8), crowd.come(1)
        await settle()
        large.task.cancel()
        await settle()
        assert large.task.cancelled()
        assert crowd.running == [first, small]
        crowd.check_books()


async def test_a_waiter_in_the_middle_that_is_cancelled_is_passed_over() -> None:
    async with Crowd(max_sessions=1) as crowd:
        first, second, third, fourth = (crowd.come() for _ in range(4))
        await settle()
        third.task.cancel()
        for request in (first, second, fourth):
            await settle()
            assert crowd.running == [request]
            request.end()


async def test_a_waiter_that_is_cancelled_just_after_it_was_admitted_leaves_its_room_to_the_next() -> None:
    async with Crowd(capacity=10) as crowd:
        first, second, third = crowd.come(10), crowd.come(9), crowd.come(8)
        await settle()
        first.end()
        await asyncio.sleep(0)
        assert crowd.running == []
        assert crowd.admission.reserved_tokens == 9
        second.task.cancel()
        await settle()
        assert second.task.cancelled()
        assert crowd.running == [third]
        crowd.check_books()


@pytest.mark.parametrize("cancelled_first", [True, False])
async def test_a_waiter_that_is_cancelled_just_before_it_is_admitted_leaves_its_room_to_the_next(
    cancelled_first: bool,
) -> None:
    async with Crowd(capacity=10) as crowd:
        first, second, third = crowd.come(10), crowd.come(9), crowd.come(8)
        await settle()
        for act in (second.task.cancel, first.end) if cancelled_first else (first.end, second.task.cancel):
            act()
        await settle()
        assert second.task.cancelled()
        assert crowd.running == [third]
        crowd.check_books()


async def test_when_all_give_up_at_once_nothing_is_left() -> None:
    async with Crowd(max_sessions=3) as crowd:
        requests = [crowd.come(3) for _ in range(200)]
        await settle()
        for request in requests:
            request.task.cancel()
        await asyncio.gather(*(request.task for request in requests), return_exceptions=True)
        crowd.check_books()
        assert crowd.present == []
        again = crowd.come(10)
        await settle()
        assert crowd.running == [again]
