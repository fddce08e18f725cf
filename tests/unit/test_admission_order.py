"""Admission: the order in which requests run while others come, leave and are cancelled."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.crowd import Crowd, settle

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
            assert self.crowd.running, "no session runs, but one waits"
            assert is_full or reserved + self.crowd.waiting[0].num_tokens > self.crowd.noticed_capacity, "there is room"

    @invariant()
    def the_limits_hold(self) -> None:
        admission = self.crowd.admission
        assert len(self.crowd.running) <= admission.num_running <= self.crowd.max_sessions
        assert admission.num_queued >= 0
        assert admission.num_running + admission.num_queued <= self.crowd.max_sessions + self.crowd.max_queued
        assert admission.capacities.reserved_bytes >= sum(request.num_tokens for request in self.crowd.running)
        assert (admission.capacities.reserved_bytes == 0) is (admission.num_running == 0)

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
        assert crowd.admission.capacities.reserved_bytes == 9
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
