"""Admission between clients: each gets its share under any behaviour of the others, and none waits for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from coordinator.sessions.admission import _ROUNDS_IN_A_ROW
from specd.errors import ResourceExhaustedError
from tests.unit.crowd import Crowd, Request, settle
from tests.unit.crowd_machine import CrowdMachine

CLIENTS = ("a", "b", "c")
# Seconds per token of each session, by the number of sessions that run together: on a large GPU, a small one, a CPU.
SECONDS_PER_TOKEN: dict[str, Callable[[int], float]] = {
    "constant": lambda _: 1.0,
    "mixed": lambda number: 3.0 + number,
    "linear": lambda number: number,
}
clients = st.sampled_from(CLIENTS)


class Clients(CrowdMachine):
    """Three clients with sessions that run, pause and continue in any order."""

    @initialize(
        max_sessions=st.integers(1, 6),
        max_queued=st.sampled_from([0, 2, 10]),
        capacity=st.integers(4, 12) | st.just(100),
        cost=st.sampled_from(sorted(SECONDS_PER_TOKEN)),
    )
    def start(self, max_sessions: int, max_queued: int, capacity: int, cost: str) -> None:
        self.cost = cost
        self.begin(
            max_sessions=max_sessions,
            max_queued=max_queued,
            capacity=capacity,
            seconds_per_token=self.seconds_per_token,
        )
        # For each client that waits and has nothing: whose sessions have begun since.
        self.passed: dict[str, Counter[str]] = {}

    def seconds_per_token(self, number: int) -> float:
        return SECONDS_PER_TOKEN[self.cost](number)

    def settle(self) -> None:
        num_begun = len(self.crowd.begun)
        super().settle()
        for request in self.crowd.begun[num_begun:]:
            self.passed.pop(request.client, None)
            for passed in self.passed.values():
                passed[request.client] += 1
        has = {one.client for one in (*self.crowd.running, *self.crowd.paused)}
        waiting = {one.client for one in self.crowd.waiting} - has
        self.passed = {client: self.passed.get(client, Counter()) for client in waiting}

    @rule(client=clients, num_tokens=st.integers(1, 3) | st.integers(1, 12))
    def come(self, client: str, num_tokens: int) -> None:
        self.crowd.come(min(num_tokens, self.crowd.capacity), client)
        self.settle()

    @rule(client=clients, number=st.integers(2, 6))
    def several_come(self, client: str, number: int) -> None:
        for _ in range(number):
            self.crowd.come(1, client)
        self.settle()

    @rule(cost=st.sampled_from(sorted(SECONDS_PER_TOKEN)))
    def all_end_rounds(self, cost: str) -> None:
        """Change the cost of a batch, and let all running sessions end enough rounds to notice it."""
        self.cost = cost
        for _ in range(2 * len(self.crowd.running) + _ROUNDS_IN_A_ROW):
            before = self.num_by_client(self.crowd.running)
            for one in [*self.crowd.running]:
                one.next_round()
            self.settle()
            running = self.num_by_client(self.crowd.running)
            assert all(running[client] for client in before), "who wants one keeps one"
        if self.is_clear:
            assert self.is_affordable(len(self.crowd.running)), "each client is as fast as with its part of the machine"
            most = max(running.values(), default=0)
            for client in CLIENTS:
                if client in self.heads or self.goes_on(client):
                    assert self.share(client) >= (most - 1) / self.crowd.max_sessions
            self.check_that_no_place_is_left_empty()

    def num_by_client(self, requests: list[Request]) -> Counter[str]:
        return Counter(one.client for one in requests)

    def share(self, client: str) -> float:
        """Return the share of places, or of memory, by which a client gets its next turn."""
        crowd = self.crowd
        places = self.num_by_client(crowd.running)[client] / crowd.max_sessions
        reserved = sum(one.num_tokens for one in (*crowd.running, *crowd.paused) if one.client == client)
        return places if self.goes_on(client) else max(places, reserved / crowd.capacity)

    @property
    def heads(self) -> dict[str, Request]:
        """Return who is to begin next of each client."""
        return {one.client: one for one in reversed(self.crowd.waiting)}

    def goes_on(self, client: str) -> bool:
        return any(one.client == client and one.goes_on for one in self.crowd.paused)

    def fits(self, requests: Iterable[Request]) -> bool:
        """Return whether there is memory for each of them alone."""
        reserved = sum(one.num_tokens for one in (*self.crowd.running, *self.crowd.paused))
        return all(reserved + one.num_tokens <= self.crowd.capacity or not reserved for one in requests)

    @property
    def is_clear(self) -> bool:
        """Whether no request waits for memory, or for another's."""
        return (
            self.fits(self.crowd.waiting) and sum(one.num_tokens for one in self.crowd.present) <= self.crowd.capacity
        )

    def is_affordable(self, number: int) -> bool:
        """Return whether this number may run without making the clients with the fewest sessions too slow."""
        crowd = self.crowd
        going_on = [one for one in crowd.paused if one.goes_on]
        wanted = self.num_by_client([*crowd.running, *going_on, *crowd.waiting])
        if len(wanted) < 2:
            return True
        fewest = min(*wanted.values(), max(crowd.max_sessions // len(wanted), 1))
        longest = len(wanted) * self.seconds_per_token(fewest)
        return number <= max(len(wanted) * fewest, len(wanted)) or self.seconds_per_token(number) <= longest

    def check_that_no_place_is_left_empty(self) -> None:
        num_running = len(self.crowd.running)
        if num_running < self.crowd.max_sessions and self.is_affordable(num_running + 1):
            assert not self.crowd.waiting
            assert not any(map(self.goes_on, CLIENTS))

    @invariant()
    def the_limits_hold(self) -> None:
        crowd = self.crowd
        if len(crowd.running) > crowd.max_sessions:
            assert len(crowd.running) == crowd.max_sessions + 1
            of_client = Counter(one.client for one in crowd.running)
            assert min(of_client.values()) == 1 < max(of_client.values())
        assert crowd.admission.num_queued <= crowd.max_sessions + crowd.max_queued
        gave_way = crowd.max_sessions + 1 if any(map(self.goes_on, CLIENTS)) else 0
        assert len(crowd.paused) <= crowd.max_sessions + crowd.max_queued + gave_way
        assert sum(one.num_tokens for one in (*crowd.running, *crowd.paused)) <= crowd.capacity

    @invariant()
    def nobody_is_kept_out_by_one_who_runs_several(self) -> None:
        running = self.num_by_client(self.crowd.running)
        if len(self.crowd.running) <= self.crowd.max_sessions and max(running.values(), default=0) > 1:
            heads = [head for client, head in self.heads.items() if client not in running]
            assert not any(self.goes_on(client) for client in CLIENTS if client not in running)
            assert not heads or not self.fits(self.heads.values())

    @invariant()
    def who_waits_with_nothing_is_passed_once_by_each_other_at_most(self) -> None:
        assert all(number <= 1 for passed in self.passed.values() for number in passed.values())

    def check_empty(self) -> None:
        super().check_empty()
        assert self.crowd.admission._clients == {}


TestClients = Clients.TestCase
TestClients.settings = settings(max_examples=100, stateful_step_count=40)


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
        assert not refused.refusal_metadata
        for number, newcomer in enumerate([crowd.come(client="b"), crowd.come(client="b")]):
            await settle()
            assert newcomer in crowd.waiting
            assert greedy[-1 - number].reason == "QUEUE_FULL"
            assert greedy[-1 - number].refusal_metadata == {"gave_way": "true"}
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
                pytest.raises(ResourceExhaustedError, match="this client has 2 requests") as refused,
                crowd.admission.place("a", 2),
            ):
                pass
            assert refused.value.reason == "CLIENT_SESSIONS"
            assert refused.value.retry_after_seconds > 0
            with crowd.admission.place("b", 1):
                pass
        with crowd.admission.place("a", 2):
            pass
