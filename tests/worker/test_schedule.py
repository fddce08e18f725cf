"""The scheduler: steps for any order of jobs, and the waiting times in a simulated worker."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specd.worker.engine.jobs import Feed
from specd.worker.engine.scheduler import MAX_STEP_ROWS, MAX_STEP_TOKENS, ROUNDS_TO_CHUNKS, Scheduler, StepTime

FIXED = 1.0
CHUNK_SECONDS = 5.0


@dataclass(frozen=True)
class FakeFeed:
    num_tokens: int
    wants_logits: bool
    network: str = "target"


class Session:
    """Anything that can be hashed and weakly referred to."""


STRAGGLER = Session()


@dataclass(eq=False)
class FakeJob:
    feed: Feed
    session: Hashable
    added_at: float = 0.0


def make_round(num_tokens: int = 4, session: Hashable = None) -> FakeJob:
    return FakeJob(cast(Feed, FakeFeed(num_tokens, wants_logits=True)), session)


def make_prefill(num_tokens: int = 100) -> FakeJob:
    return FakeJob(cast(Feed, FakeFeed(num_tokens, wants_logits=False)), None)


def rounds_step(num_tokens: int, seconds: float) -> StepTime:
    return StepTime(1, num_tokens, is_prefill=False, seconds=seconds)


def chunk_step(seconds: float) -> StepTime:
    return StepTime(1, 100, is_prefill=True, seconds=seconds)


def waiting_schedule(now: float) -> Scheduler[FakeJob]:
    """Return a schedule that waits for a session which is expected soon."""
    schedule = Scheduler[FakeJob]()
    for num_tokens in (1, 2, 3, 4):
        schedule.stepped(rounds_step(num_tokens, FIXED + 0.1 * num_tokens), now)
    schedule.window.answered(STRAGGLER, now - 0.4)
    schedule.window.arrived(STRAGGLER, now)
    schedule.window.answered(STRAGGLER, now)
    return schedule


@dataclass
class Expected:
    """The waiting jobs, in the order of their arrival."""

    rounds: list[FakeJob] = field(default_factory=list)
    prefills: list[FakeJob] = field(default_factory=list)


def check_step(schedule: Scheduler[FakeJob], expected: Expected, now: float) -> tuple[list[FakeJob], float | None]:
    """Take the next step, and check that it is one that is allowed."""
    assert [*schedule] == expected.rounds + expected.prefills
    assert len(schedule) == len(expected.rounds) + len(expected.prefills)
    jobs, wait_until = schedule.next_step(now)
    if not jobs:
        assert not expected.prefills
        if expected.rounds:
            assert wait_until is not None
            assert now < wait_until <= now + schedule.window.fixed_seconds
            assert len(expected.rounds) < MAX_STEP_ROWS
            assert sum(job.feed.num_tokens for job in expected.rounds) < MAX_STEP_TOKENS
        else:
            assert wait_until is None
        return jobs, wait_until
    assert wait_until is None
    if jobs[0].feed.wants_logits:
        assert jobs == expected.rounds[: len(jobs)]
        del expected.rounds[: len(jobs)]
        num_tokens = sum(job.feed.num_tokens for job in jobs)
        assert len(jobs) <= MAX_STEP_ROWS
        assert num_tokens <= MAX_STEP_TOKENS or len(jobs) == 1
        if expected.rounds:  # there was no room
            next_tokens = expected.rounds[0].feed.num_tokens
            assert len(jobs) == MAX_STEP_ROWS or num_tokens + next_tokens > MAX_STEP_TOKENS
    else:
        assert jobs == [expected.prefills.pop(0)]
    return jobs, None


events = st.lists(
    st.one_of(
        st.tuples(st.just("round"), st.integers(1, 300)),
        st.tuples(st.just("rounds"), st.integers(2, 2 * MAX_STEP_ROWS)),
        st.tuples(st.just("prefill"), st.integers(1, 2048)),
        st.tuples(st.just("step"), st.floats(0.0, 3.0)),
        st.tuples(st.just("answer"), st.floats(0.0, 3.0)),
    ),
    max_size=40,
)


@given(events=events)
def test_every_job_comes_out_once_and_in_its_order_whatever_happens(events: list[tuple[str, float]]) -> None:
    now, expected, taken = 100.0, Expected(), Counter[int]()
    schedule = waiting_schedule(now)
    added: list[FakeJob] = []

    def add(*jobs: FakeJob) -> None:
        added.extend(jobs)
        for job in jobs:
            schedule.add(job, now)
            (expected.rounds if job.feed.wants_logits else expected.prefills).append(job)

    def step(seconds: float) -> None:
        nonlocal now
        jobs, wait_until = check_step(schedule, expected, now)
        taken.update(id(job) for job in jobs)
        now = wait_until if wait_until is not None else now + seconds
        if jobs:
            num_tokens = sum(job.feed.num_tokens for job in jobs)
            schedule.stepped(StepTime(len(jobs), num_tokens, not jobs[0].feed.wants_logits, seconds), now)

    for what, value in events:
        if what == "round":
            add(make_round(int(value)))
        elif what == "rounds":
            add(*(make_round(1) for _ in range(int(value))))
        elif what == "prefill":
            add(make_prefill(int(value)))
        elif what == "answer":
            schedule.window.arrived(STRAGGLER, now)
            schedule.window.answered(STRAGGLER, now + value)
        else:
            step(value)
    for _ in range(3 * len(added)):
        step(1.0)
    assert len(schedule) == 0
    assert taken == Counter(id(job) for job in added)


def test_a_step_is_for_all_rounds_that_fit() -> None:
    schedule = Scheduler[FakeJob]()
    rounds = [make_round(size) for size in (100, 100, 57, 1, MAX_STEP_TOKENS + 1, 1)]
    for job in rounds:
        schedule.add(job, 1.0)
    assert [schedule.next_step(1.0)[0] for _ in range(5)] == [rounds[:2], rounds[2:4], rounds[4:5], rounds[5:], []]


def test_a_step_is_for_so_many_sessions() -> None:
    schedule = Scheduler[FakeJob]()
    for _ in range(MAX_STEP_ROWS + 1):
        schedule.add(make_round(1), 1.0)
    assert [len(schedule.next_step(1.0)[0]) for _ in range(2)] == [MAX_STEP_ROWS, 1]


def test_prefills_take_turns_with_each_other() -> None:
    schedule, prefills = Scheduler[FakeJob](), [make_prefill() for _ in range(3)]
    for job in prefills:
        schedule.add(job, 1.0)
    for job in prefills * 3:
        assert schedule.next_step(1.0) == ([job], None)
        schedule.stepped(chunk_step(1.0), 1.0)
        schedule.add(job, 1.0)


def test_rounds_go_on_for_so_many_times_as_long_as_a_chunk_took() -> None:
    schedule, one, prefill = Scheduler[FakeJob](), make_round(), make_prefill()
    schedule.stepped(chunk_step(CHUNK_SECONDS), 10.0)
    schedule.add(prefill, 10.0)
    for now, job in ((10.0, one), (24.9, one), (25.0, prefill)):
        if job is one:
            schedule.add(one, now)
        else:
            schedule.add(make_round(), now)
        assert schedule.next_step(now) == ([job], None)


def test_the_time_of_chunks_says_nothing_about_that_of_rounds() -> None:
    schedule = waiting_schedule(10.0)
    for seconds in (5.0, 50.0):
        schedule.stepped(StepTime(1, 1000, is_prefill=True, seconds=seconds), 10.0)
    assert schedule.window.fixed_seconds == pytest.approx(FIXED)


def test_a_chunk_does_not_wait_when_there_is_nothing_else() -> None:
    schedule, prefill = Scheduler[FakeJob](), make_prefill()
    schedule.stepped(chunk_step(CHUNK_SECONDS), 10.0)
    schedule.add(prefill, 10.0)
    assert schedule.next_step(10.0) == ([prefill], None)


def test_a_step_waits_for_a_straggler_and_for_no_longer_than_expected() -> None:
    schedule, one, straggler = waiting_schedule(10.0), make_round(), make_round()
    schedule.add(one, 10.0)
    jobs, wait_until = schedule.next_step(10.0)
    assert jobs == []
    assert wait_until == pytest.approx(10.8)
    schedule.add(straggler, 10.5)
    schedule.window.arrived(STRAGGLER, 10.5)
    assert schedule.next_step(10.5) == ([one, straggler], None)

    schedule = waiting_schedule(10.0)
    schedule.add(one, 10.0)
    assert schedule.next_step(10.5)[0] == []
    assert schedule.next_step(10.9) == ([one], None)


def test_the_wait_is_counted_from_the_first_that_waits() -> None:
    schedule = waiting_schedule(10.0)
    rounds = [make_round() for _ in range(4)]
    others = [Session() for _ in range(4)]
    for i, (job, other) in enumerate(zip(rounds, others, strict=True)):
        schedule.add(job, 10.0 + 0.3 * i)
        schedule.window.answered(other, 10.0 + 0.3 * i)
    assert schedule.next_step(10.95)[1] == pytest.approx(10.0 + FIXED)
    assert schedule.next_step(11.01) == (rounds, None)


def test_what_came_during_a_step_waits_for_those_that_were_in_it() -> None:
    """Else two groups of sessions that have come apart take turns for ever, each in steps of its own."""
    schedule, one = waiting_schedule(10.0), make_round()
    schedule.add(one, 10.1)
    schedule.window.arrived(STRAGGLER, 10.2)
    schedule.stepped(rounds_step(4, FIXED + 0.4), 20.0)
    schedule.window.answered(STRAGGLER, 20.0)
    jobs, wait_until = schedule.next_step(20.0)
    assert jobs == []
    assert wait_until is not None
    assert 20.0 < wait_until < 20.0 + FIXED
    assert schedule.next_step(wait_until) == ([one], None)


def test_a_window_goes_by_what_is_expected_until_steps_differ() -> None:
    """Steps for a session each are all alike: without a cost to begin with they would stay so."""
    schedule = Scheduler[FakeJob]()
    for expected in (0.0, FIXED):
        schedule.window.expect(expected)
        schedule.stepped(rounds_step(1, 1.1), 20.0)
        assert schedule.window.fixed_seconds == expected


def test_a_step_is_for_the_network_that_waits_longest() -> None:
    """A target that drafts itself has jobs of two."""
    schedule = Scheduler[FakeJob]()
    jobs = [FakeJob(cast(Feed, FakeFeed(1, True, name)), None) for name in ("draft", "target", "draft", "target")]
    for job in jobs:
        schedule.add(job, 10.0)
    assert schedule.next_step(10.0)[0] == [jobs[0], jobs[2]]
    schedule.add(jobs[0], 10.1)
    assert schedule.next_step(10.2)[0] == [jobs[1], jobs[3]]
    assert schedule.next_step(10.3)[0] == [jobs[0]]


def test_nobody_is_waited_for_when_nobody_is_expected() -> None:
    schedule, one = waiting_schedule(10.0), make_round()
    schedule.window.arrived(STRAGGLER, 10.0)
    schedule.add(one, 10.0)
    assert schedule.next_step(10.0) == ([one], None)


@pytest.mark.parametrize(("num_rounds", "num_tokens"), [(MAX_STEP_ROWS, 1), (2, MAX_STEP_TOKENS // 2)])
def test_nobody_is_waited_for_when_a_step_is_full(num_rounds: int, num_tokens: int) -> None:
    schedule = waiting_schedule(10.0)
    rounds = [make_round(num_tokens) for _ in range(num_rounds)]
    for job in rounds[:-1]:
        schedule.add(job, 10.0)
    assert schedule.next_step(10.0)[0] == []
    schedule.add(rounds[-1], 10.0)
    assert schedule.next_step(10.0) == (rounds, None)


@pytest.mark.parametrize(("chunk_ended_at", "is_due"), [(-10.0, True), (9.0, False)])
def test_nobody_is_waited_for_while_a_prefill_could_run(chunk_ended_at: float, is_due: bool) -> None:
    schedule, one, prefill = waiting_schedule(10.0), make_round(), make_prefill()
    schedule.stepped(chunk_step(CHUNK_SECONDS), chunk_ended_at)
    schedule.add(one, 10.0)
    assert schedule.next_step(10.0)[0] == []
    schedule.add(prefill, 10.0)
    assert schedule.next_step(10.0) == ([prefill if is_due else one], None)


@dataclass
class Served:
    """The record of a simulated worker: the waiting time of each job, and the busy time by kind."""

    round_waits: list[float] = field(default_factory=list)
    chunk_waits: list[float] = field(default_factory=list)
    chunks_of: Counter[int] = field(default_factory=Counter)
    round_seconds: float = 0.0
    longest_rounds_step: float = 0.0
    longest_chunk: float = 0.0
    most_fixed: float = 0.0


def serve(
    num_sessions: int, num_prefills: int, *, away_seconds: float, pause_seconds: float, chunk_seconds: float
) -> Served:
    """Let sessions come back after each round, and prompts after each chunk, for 600 s."""
    rng, schedule, served = random.Random(0), Scheduler[FakeJob](), Served()
    jobs = [make_round(rng.randint(1, 7), Session()) for _ in range(num_sessions)]
    jobs += [make_prefill() for _ in range(num_prefills)]
    coming = [(0.0, i) for i in range(len(jobs))]
    indices = {job: i for i, job in enumerate(jobs)}
    now = 0.0
    while now < 600.0:
        while coming and coming[0][0] <= now:
            job = jobs[heapq.heappop(coming)[1]]
            job.added_at = now
            if job.session is not None:
                schedule.window.arrived(job.session, now)
            schedule.add(job, now)
        taken, wait_until = schedule.next_step(now)
        if not taken:
            now = min(coming[0][0] if coming else wait_until or now, wait_until or coming[0][0])
            continue
        is_prefill = not taken[0].feed.wants_logits
        num_tokens = sum(job.feed.num_tokens for job in taken)
        took = (chunk_seconds if is_prefill else FIXED + 0.05 * num_tokens) * rng.uniform(0.9, 1.1)
        waits = served.chunk_waits if is_prefill else served.round_waits
        waits.extend(now - job.added_at for job in taken)
        if is_prefill:
            served.longest_chunk = max(served.longest_chunk, took)
            served.chunks_of[indices[taken[0]]] += 1
        else:
            served.round_seconds += took
            served.longest_rounds_step = max(served.longest_rounds_step, took)
        served.most_fixed = max(served.most_fixed, schedule.window.fixed_seconds)
        now += took
        for job in taken:
            if job.session is not None:
                schedule.window.answered(job.session, now)
            again = away_seconds if job.feed.wants_logits else pause_seconds
            heapq.heappush(coming, (now + again * rng.random(), indices[job]))
        schedule.stepped(StepTime(len(taken), num_tokens, is_prefill, took), now)
    return served


loads = {
    "num_sessions": st.integers(1, 12),
    "num_prefills": st.integers(1, 4),
    "chunk_seconds": st.sampled_from([0.2, 1.0, 5.0, 20.0]),
}


@given(**loads, away_seconds=st.sampled_from([0.0, 0.5, 3.0, 30.0]), pause_seconds=st.sampled_from([0.0, 3.0, 30.0]))
@settings(max_examples=60)
def test_no_round_waits_for_longer_than_a_chunk_a_step_and_the_window(
    num_sessions: int, num_prefills: int, chunk_seconds: float, away_seconds: float, pause_seconds: float
) -> None:
    served = serve(
        num_sessions,
        num_prefills,
        away_seconds=away_seconds,
        pause_seconds=pause_seconds,
        chunk_seconds=chunk_seconds,
    )
    assert max(served.round_waits) <= served.longest_chunk + served.longest_rounds_step + served.most_fixed
    # A prompt waits for a chunk of each of the others, and for the rounds between, whose time is that of some chunks
    # and of the step under way.
    turn = (1 + ROUNDS_TO_CHUNKS) * served.longest_chunk + served.longest_rounds_step
    assert max(served.chunk_waits) <= num_prefills * turn


@given(**loads)
@settings(max_examples=30)
def test_rounds_and_prefills_that_never_pause_share_the_time(
    num_sessions: int, num_prefills: int, chunk_seconds: float
) -> None:
    served = serve(num_sessions, num_prefills, away_seconds=0.0, pause_seconds=0.0, chunk_seconds=chunk_seconds)
    counts = [served.chunks_of[i] for i in range(num_sessions, num_sessions + num_prefills)]
    assert max(counts) - min(counts) <= 1
    rounds_to_chunk = served.round_seconds / sum(counts)
    share = ROUNDS_TO_CHUNKS * chunk_seconds
    assert 0.85 * share <= rounds_to_chunk <= 1.15 * share + served.longest_rounds_step
