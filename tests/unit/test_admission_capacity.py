"""Admission while the target's memory shrinks and grows: nothing that fits waits for ever, and the rest is refused."""

from __future__ import annotations

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.unit.crowd import Crowd, Request

clients = st.sampled_from("abc")
capacities = st.integers(1, 12)


class Capacity(RuleBasedStateMachine):
    """Three clients whose sessions come, run, pause and end in any order, and a capacity that changes meanwhile."""

    @initialize(
        max_sessions=st.integers(1, 5),
        max_queued=st.sampled_from([0, 2, 10]),
        capacity=capacities,
        cost=st.sampled_from([lambda number: 1.0, lambda number: 3.0 + number, lambda number: number]),
    )
    def start(self, max_sessions: int, max_queued: int, capacity: int, cost: object) -> None:
        self.loop = asyncio.new_event_loop()
        self.crowd = Crowd(
            max_sessions=max_sessions,
            max_queued=max_queued,
            capacity=capacity,
            seconds_per_token=cost,  # type: ignore[arg-type]
            loop=self.loop,
        )

    def settle(self) -> None:
        crowd = self.crowd
        for _ in range(4 * len(crowd.everyone) + 8):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
        crowd.check_books()
        if crowd.capacity != crowd.noticed_capacity:
            return
        assert all(one.num_tokens <= crowd.capacity for one in crowd.waiting), "it waits for what never comes"
        if not crowd.running:
            assert not any(one.goes_on for one in crowd.paused), "nothing runs, and one waits to go on"
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
        data.draw(st.sampled_from(self.sleeping)).next_round()
        self.settle()

    @precondition(lambda self: self.crowd.running)
    @rule(data=st.data())
    def end_a_round(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.crowd.running)).next_round()
        self.settle()

    @property
    def sleeping(self) -> list[Request]:
        return [one for one in self.crowd.paused if not one.goes_on]

    def teardown(self) -> None:
        if not hasattr(self, "crowd"):
            return
        try:
            for _ in range(2 * len(self.crowd.everyone) + 1):  # if all go on and end, all get their turn or a refusal
                for one in self.sleeping:
                    one.next_round()
                for one in [*self.crowd.running]:
                    one.end()
                self.settle()
            assert self.crowd.present == []
        finally:
            tasks = [request.task for request in self.crowd.everyone]
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.wait(tasks) if tasks else asyncio.sleep(0))
            self.loop.close()


TestCapacity = Capacity.TestCase
TestCapacity.settings = settings(max_examples=200, stateful_step_count=40)
