"""Admission while the target's memory shrinks and grows: nothing that fits waits for ever, and the rest is refused."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from tests.unit.crowd_machine import CrowdMachine

clients = st.sampled_from("abc")
capacities = st.integers(1, 12)


class Capacity(CrowdMachine):
    """Three clients with sessions that come, run, pause and end in any order, and a capacity that changes."""

    @initialize(
        max_sessions=st.integers(1, 5),
        max_queued=st.sampled_from([0, 2, 10]),
        capacity=capacities,
        cost=st.sampled_from([lambda number: 1.0, lambda number: 3.0 + number, lambda number: number]),
    )
    def start(self, max_sessions: int, max_queued: int, capacity: int, cost: object) -> None:
        self.begin(max_sessions=max_sessions, max_queued=max_queued, capacity=capacity, seconds_per_token=cost)

    def settle(self) -> None:
        super().settle()
        crowd = self.crowd
        if crowd.capacity != crowd.noticed_capacity:
            return
        assert all(one.num_tokens <= crowd.capacity for one in crowd.waiting), "it waits for memory that never comes"
        if not crowd.running:
            assert not any(one.goes_on for one in crowd.paused), "nothing runs, and a session waits to continue"
            assert crowd.paused or not crowd.waiting, "nothing runs, and one that fits waits"

    @rule(client=clients, num_tokens=st.integers(1, 12))
    def come(self, client: str, num_tokens: int) -> None:
        self.crowd.come(num_tokens, client)
        self.settle()

    @rule(capacity=capacities)
    def change_the_capacity(self, capacity: int) -> None:
        self.crowd.capacity = capacity

    @rule()
    def review(self) -> None:
        self.crowd.noticed_capacity = self.crowd.capacity
        self.crowd.admission.review()
        self.settle()


TestCapacity = Capacity.TestCase
TestCapacity.settings = settings(max_examples=200, stateful_step_count=40)
