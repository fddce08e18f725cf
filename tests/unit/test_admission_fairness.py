"""Admission between clients: each gets its share, whatever the others do, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specd.errors import ResourceExhaustedError
from tests.unit.crowd import Crowd, Request, settle

CLIENTS = ("a", "b", "c")
clients = st.sampled_from(CLIENTS)


class Clients(RuleBasedStateMachine):
    """Three clients, whose sessions run, pause and go on in any order."""

    @initialize(max_sessions=st.integers(1, 4), max_queued=st.sampled_from([0, 2, 10]), capacity=st.integers(4, 12))
    def start(self, max_sessions: int, max_queued: int, capacity: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.crowd = Crowd(max_sessions=max_sessions, max_queued=max_queued, capacity=capacity, loop=self.loop)
        # For each client that waits and has nothing: whose sessions have begun since.
        self.passed: dict[str, Counter[str]] = {}

    def settle(self) -> None:
        num_begun = len(self.crowd.begun)
        for _ in range(3 * len(self.crowd.everyone) + 6):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
        for request in self.crowd.begun[num_begun:]:
            self.passed.pop(request.client, None)
            for passed in self.passed.values():
                passed[request.client] += 1
        has = {one.client for one in (*self.crowd.running, *self.crowd.paused)}
        waiting = {one.client for one in self.crowd.waiting} - has
        self.passed = {client: self.passed.get(client, Counter()) for client in waiting}
        self.crowd.check_books()

    @rule(client=clients, num_tokens=st.integers(1, 3) | st.integers(1, 12))
    def come(self, client: str, num_tokens: int) -> None:
        self.crowd.come(min(num_tokens, self.crowd.capacity), client)
        self.settle()

    @precondition(lambda self: self.crowd.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.crowd.running)).end()
        self.settle()

    @precondition(lambda self: self.crowd.present)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.crowd.present)).task.cancel()
        self.settle()

    @precondition(lambda self: self.crowd.running)
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.crowd.running)).pause()
        self.settle()

    @precondition(lambda self: self.sleeping)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.sleeping)).resume()
        self.settle()

    @property
    def sleeping(self) -> list[Request]:
        return [one for one in self.crowd.paused if one.resuming is None or one.resuming.done()]

    @invariant()
    def the_limits_hold(self) -> None:
        crowd = self.crowd
        if len(crowd.running) > crowd.max_sessions:
            assert len(crowd.running) == crowd.max_sessions + 1
            of_client = Counter(one.client for one in crowd.running)
            assert min(of_client.values()) == 1 < max(of_client.values())
        assert crowd.admission.num_queued <= crowd.max_sessions + crowd.max_queued
        assert len(crowd.paused) <= crowd.max_sessions + crowd.max_queued
        assert sum(one.num_tokens for one in (*crowd.running, *crowd.paused)) <= crowd.capacity

    @invariant()
    def no_place_is_left_empty(self) -> None:
        crowd = self.crowd
        if len(crowd.running) < crowd.max_sessions:
            assert len(self.sleeping) == len(crowd.paused), "one that goes on needs no memory"
            reserved = sum(one.num_tokens for one in (*crowd.running, *crowd.paused))
            heads = {one.client: one for one in reversed(crowd.waiting)}.values()
            assert not heads or max(one.num_tokens for one in heads) + reserved > crowd.capacity

    @invariant()
    def nobody_is_kept_out_by_one_who_runs_several(self) -> None:
        crowd = self.crowd
        of_client = Counter(one.client for one in crowd.running)
        if len(crowd.running) == crowd.max_sessions and max(of_client.values()) > 1:
            assert all(one.client in of_client for one in self.crowd.paused if one not in self.sleeping)
            reserved = sum(one.num_tokens for one in (*crowd.running, *crowd.paused))
            heads = {one.client: one for one in reversed(crowd.waiting) if one.client not in of_client}.values()
            assert not heads or max(one.num_tokens for one in heads) + reserved > crowd.capacity

    @invariant()
    def who_waits_with_nothing_is_passed_once_by_each_other_at_most(self) -> None:
        assert all(number <= 1 for passed in self.passed.values() for number in passed.values())

    def teardown(self) -> None:
        if not hasattr(self, "crowd"):
            return
        try:
            self.settle()
            for _ in range(2 * len(self.crowd.everyone) + 1):  # if all go on and end, all get their turn
                for one in self.sleeping:
                    one.resume()
                for one in [*self.crowd.running]:
                    one.end()
                self.settle()
            assert self.crowd.present == []
            assert self.crowd.admission._clients == {}
        finally:
            tasks = [request.task for request in self.crowd.everyone]
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.wait(tasks) if tasks else asyncio.sleep(0))
            self.loop.close()


TestClients = Clients.TestCase
TestClients.settings = settings(max_examples=200, stateful_step_count=40)


async def test_one_client_alone_may_use_everything() -> None:
    async with Crowd(max_sessions=3, max_queued=4) as crowd:
        requests = [crowd.come(client="a") for _ in range(7)]
        await settle()
        assert crowd.running == requests[:3]
        assert crowd.waiting == requests[3:]


async def test_a_newcomer_begins_at_once_and_further_ones_before_those_who_have_many() -> None:
    async with Crowd(max_sessions=3, max_queued=10) as crowd:
        greedy = [crowd.come(client="a") for _ in range(8)]
        await settle()
        newcomers = [crowd.come(client="b"), crowd.come(client="b"), crowd.come(client="c")]
        await settle()
        assert crowd.running == [*greedy[:3], newcomers[0]]  # one more than there are places
        greedy[0].end()
        await settle()
        assert crowd.running == [*greedy[1:3], newcomers[0], newcomers[2]]
        greedy[1].end()
        await settle()
        assert crowd.running == [greedy[2], newcomers[0], newcomers[2]]  # all places are taken, by one each
        newcomers[0].end()
        await settle()
        assert crowd.running == [greedy[2], newcomers[2], newcomers[1]]


async def test_clients_that_run_one_each_keep_a_newcomer_waiting() -> None:
    async with Crowd(max_sessions=2) as crowd:
        crowd.come(client="a")
        first = crowd.come(client="b")
        await settle()
        newcomer = crowd.come(client="c")
        await settle()
        assert crowd.waiting == [newcomer]
        first.end()
        await settle()
        assert newcomer in crowd.running


async def test_memory_counts_as_much_as_places() -> None:
    async with Crowd(max_sessions=4, capacity=10) as crowd:
        crowd.come(6, client="a")
        small = [crowd.come(1, client="b") for _ in range(2)]
        full = crowd.come(2, client="c")
        await settle()
        waits = [crowd.come(1, client="a"), crowd.come(1, client="b")]
        await settle()
        full.end()
        await settle()
        assert [*crowd.running][1:] == [*small, waits[1]]  # a has most of the memory


async def test_a_large_request_of_one_client_is_not_passed_for_ever_by_small_ones_of_others() -> None:
    async with Crowd(max_sessions=4, max_queued=10, capacity=10) as crowd:
        for _ in range(3):
            crowd.come(3, client="b")
        await settle()
        large = crowd.come(10, client="a")
        await settle()
        for _ in range(20):
            crowd.come(1, client="b")
            crowd.come(1, client="c")
            crowd.running[0].end()
            await settle()
            if large in crowd.running:
                break
        assert len(crowd.begun) <= 6


async def test_who_waits_with_most_gives_way_when_the_queue_is_full() -> None:
    async with Crowd(max_sessions=1, max_queued=4) as crowd:
        greedy = [crowd.come(client="a") for _ in range(5)]
        await settle()
        refused = crowd.come(client="a")
        await settle()
        assert refused.reason == "QUEUE_FULL"
        for number, newcomer in enumerate([crowd.come(client="b"), crowd.come(client="b")]):
            await settle()
            assert newcomer in crowd.waiting
            assert greedy[-1 - number].reason == "QUEUE_FULL"
            assert greedy[-1 - number].retry_after_seconds > 0
        refused = crowd.come(client="b")  # both wait with two now
        await settle()
        assert refused.reason == "QUEUE_FULL"
        assert crowd.waiting == [*greedy[1:3], *[one for one in crowd.everyone if one.client == "b"][:2]]


async def test_one_that_has_not_asked_yet_can_give_way_too() -> None:
    async with Crowd(max_sessions=1, max_queued=2) as crowd:
        crowd.come(client="a")
        waiting, late = crowd.come(client="a"), crowd.come(None, client="a")
        await settle()
        newcomer = crowd.come(client="b")
        await settle()
        assert newcomer in crowd.waiting
        late.ask(1)
        await settle()
        assert late.reason == "QUEUE_FULL"
        assert crowd.waiting == [newcomer, waiting] or crowd.waiting == [waiting, newcomer]


async def test_a_client_has_as_many_at_a_time_as_it_may() -> None:
    async with Crowd(max_sessions=1) as crowd:
        with crowd.admission.place("a", 2), crowd.admission.place("a", 2):
            with (
                pytest.raises(ResourceExhaustedError, match="2 requests of this client") as refused,
                crowd.admission.place("a", 2),
            ):
                pass
            assert refused.value.reason == "CLIENT_SESSIONS"
            assert refused.value.retry_after_seconds > 0
            with crowd.admission.place("b", 1):
                pass
        with crowd.admission.place("a", 2):
            pass


async def test_the_place_of_a_paused_session_goes_to_the_next_and_its_memory_does_not() -> None:
    async with Crowd(max_sessions=1, capacity=10) as crowd:
        first, second, large = crowd.come(6), crowd.come(4), crowd.come(5)
        await settle()
        first.pause()
        await settle()
        assert crowd.running == [second]
        second.end()
        await settle()
        assert crowd.running == []
        assert crowd.waiting == [large]  # until there is memory
        first.resume()
        await settle()
        assert crowd.running == [first]
        first.end()
        await settle()
        assert crowd.running == [large]


async def test_a_session_that_goes_on_waits_for_a_place_before_new_ones_of_its_client() -> None:
    async with Crowd(max_sessions=1) as crowd:
        first, second, third = crowd.come(), crowd.come(), crowd.come()
        await settle()
        first.pause()
        await settle()
        first.resume()
        await settle()
        assert crowd.running == [second]
        second.end()
        await settle()
        assert crowd.running == [first]
        assert crowd.waiting == [third]


async def test_beyond_as_many_as_may_pause_a_session_keeps_its_place() -> None:
    async with Crowd(max_sessions=2, max_queued=1, capacity=100) as crowd:
        for _ in range(3):
            request = crowd.come()
            await settle()
            request.pause()
        kept = crowd.come()
        await settle()
        kept.pause()
        await settle()
        assert (len(crowd.paused), crowd.running) == (3, [kept])
