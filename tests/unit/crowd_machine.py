"""The events of the requests of a crowd, as rules for Hypothesis."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.unit.crowd import Crowd, Request


class CrowdMachine(RuleBasedStateMachine):
    """Sessions that run, pause and end in any order; subclasses define the clients and the invariants."""

    loop: asyncio.AbstractEventLoop
    crowd: Crowd

    def begin(self, **fields: Any) -> None:
        """Make an empty crowd of these limits. Call it from the rule that initializes."""
        self.loop = asyncio.new_event_loop()
        self.crowd = Crowd(loop=self.loop, **fields)

    def settle(self) -> None:
        """Run what is ready, and what that makes ready, and check the books."""
        for _ in range(4 * len(self.crowd.everyone) + 8):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
        self.crowd.check_books()

    @property
    def sleeping(self) -> list[Request]:
        """The paused requests that do not ask to continue."""
        return [one for one in self.crowd.paused if not one.goes_on]

    @precondition(lambda self: self.crowd.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """End one that runs."""
        data.draw(st.sampled_from(self.crowd.running)).end()
        self.settle()

    @precondition(lambda self: self.crowd.present)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Cancel one that runs, waits or has paused."""
        data.draw(st.sampled_from(self.crowd.present)).task.cancel()
        self.settle()

    @precondition(lambda self: self.crowd.running)
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        """Pause one that runs."""
        data.draw(st.sampled_from(self.crowd.running)).pause()
        self.settle()

    @precondition(lambda self: self.sleeping)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        """Let a paused request ask to continue."""
        data.draw(st.sampled_from(self.sleeping)).next_round()
        self.settle()

    @precondition(lambda self: self.crowd.running)
    @rule(data=st.data())
    def end_a_round(self, data: st.DataObject) -> None:
        """End a round of one that runs."""
        data.draw(st.sampled_from(self.crowd.running)).next_round()
        self.settle()

    def check_empty(self) -> None:
        """Check what is left when all have ended."""
        assert self.crowd.present == []

    def teardown(self) -> None:
        """Let all requests continue and end: each gets its turn, or a refusal."""
        if not hasattr(self, "crowd"):
            return
        try:
            self.settle()
            for _ in range(2 * len(self.crowd.everyone) + 1):
                for one in self.sleeping:
                    one.next_round()
                for one in [*self.crowd.running]:
                    one.end()
                self.settle()
            self.check_empty()
        finally:
            tasks = [request.task for request in self.crowd.everyone]
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.wait(tasks) if tasks else asyncio.sleep(0))
            self.loop.close()
