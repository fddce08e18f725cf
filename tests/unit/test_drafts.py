"""Several drafts: a session changes between them, waits for a late one, and does not ask dead ones again and again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from coordinator.core import Part, SessionSetup
from coordinator.proposals.drafter import Drafter, DraftStream
from coordinator.proposals.drafts import Drafts
from coordinator.workers.errors import WorkerLateError
from coordinator.workers.workers import Workers
from tests.unit.fake_workers import MODEL, SETUP, FakeDraft, FakeDraftStream, next_token, plan_of


class LateStream(FakeDraftStream):
    """A stream with a long prefill: its first answers are late."""

    num_late = 0

    async def answer(self, timeout_seconds: float) -> Part:
        assert isinstance(self.worker, LateDraft)
        self.worker.num_asked += 1
        if self.num_late < self.worker.most_late:
            self.num_late += 1
            raise WorkerLateError("DRAFT_LATE", "late")
        return await super().answer(timeout_seconds)


class LateDraft(FakeDraft):
    def __init__(self, most_late: int) -> None:
        super().__init__(next_token, [])
        self.most_late = most_late
        self.num_asked = 0

    def open_stream(self, setup: SessionSetup) -> FakeDraftStream:
        self.num_open += 1
        return LateStream(self)


async def propose(drafts: Sequence[FakeDraft], num_rounds: int, seconds: float) -> list[str]:
    """Return the fault of each round, or "" with tokens; a round takes some seconds by the clock."""
    now, own = 0.0, Drafts[DraftStream](Workers(drafts))
    drafter = Drafter(lambda: own, SETUP, timeout_seconds=1.0, clock=lambda: now)
    faults, tokens = [], [1, 2, 3]
    for _ in range(num_rounds):
        part = await drafter.propose(tokens, (), plan_of(2))
        assert part is not None
        faults.append(part.fault)
        tokens = [*tokens[:8], 1]
        now += seconds
    drafter.close()
    assert [draft.num_open for draft in drafts] == [0] * len(drafts)
    return faults


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
async def test_a_slow_prefill_comes_to_its_end(num_drafts: int) -> None:
    drafts = [LateDraft(2) for _ in range(num_drafts)]
    faults = await propose(drafts, 60, 0.25)
    assert faults.count("") > 30
    assert faults[-20:] == [""] * 20


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
async def test_drafts_that_hang_are_asked_less_and_less(num_drafts: int) -> None:
    drafts = [LateDraft(10**9) for _ in range(num_drafts)]
    assert "" not in await propose(drafts, 200, 0.05)
    assert sum(draft.num_asked for draft in drafts) <= 4 + 2 * num_drafts


async def test_a_session_changes_its_draft_at_once_and_a_draft_that_hangs_does_not_get_the_next_one() -> None:
    hanging, good = LateDraft(10**9), LateDraft(0)
    drafts = Drafts[DraftStream](Workers([hanging, good]))
    drafter = Drafter(lambda: drafts, SETUP, timeout_seconds=1.0, clock=lambda: 0.0)
    faults = []
    for _ in range(3):
        part = await drafter.propose([1, 2, 3], (), plan_of(2))
        assert part is not None
        faults.append(part.fault)
    assert faults == ["DRAFT_LATE", "", ""]
    assert drafts.best() is good
    hanging.model = None
    good.model = None
    assert drafts.best().model is None
    good.model = MODEL
    assert drafts.best() is good


async def test_without_any_draft_there_is_a_reason() -> None:
    drafts = Drafts(Workers[DraftStream](fault="DRAFT_UNAVAILABLE"))
    drafter = Drafter(lambda: drafts, SETUP, timeout_seconds=1.0, clock=lambda: 0.0)
    part = await drafter.propose([1], (), plan_of(2))
    assert part is not None
    assert part.fault == "DRAFT_UNAVAILABLE"
