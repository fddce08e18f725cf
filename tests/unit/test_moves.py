"""Sessions at several targets that die, stop, are late or full, and come back: the texts are the target's own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from operator import add

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from coordinator.coordinator import Coordinator
from coordinator.core import Part, Plan, Proposal, SessionSetup, Verdict
from coordinator.generation import Generation
from coordinator.proposals.drafter import DraftStream
from coordinator.sessions.admission import Admission
from coordinator.sessions.capacities import Capacities
from coordinator.sessions.capacity import Capacity
from coordinator.sessions.place import Place
from coordinator.sessions.request import GenerationRequest
from coordinator.telemetry.metrics import CoordinatorMetrics
from coordinator.workers import verifier as verifier_module
from coordinator.workers.errors import WorkerFullError, WorkerLateError, WorkerLostError
from coordinator.workers.remote_worker import RemoteWorker, WorkerLife
from coordinator.workers.verifier import TargetStream
from coordinator.workers.workers import Workers
from specd.cache_footprint import ALL_TOKENS, CacheFootprint
from specd.coordinator_settings import CoordinatorSettings
from specd.errors import UnavailableError
from specd.sampling import Sampling
from specd.step_costs import StepCosts
from tests.unit.mortal_server import END_TOKEN, MODEL, byte_tokenizer, next_token
from tests.unit.served_models import new_store

PROMPT = b"ab abab ab"


@pytest.fixture(autouse=True)
def no_pause_between_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier_module, "_FIRST_PAUSE_SECONDS", 0.0)


class Target(RemoteWorker[TargetStream]):
    """A target that can die and come back. After a stop, its open streams still work."""

    def __init__(self, number: int, world: World, *, kernel_class: str = "", cache_bytes: int = 2**40) -> None:
        super().__init__("TARGET_UNAVAILABLE", MODEL, f"target {number}")
        self.world = world
        self.cache_bytes, self.footprint = cache_bytes, CacheFootprint({ALL_TOKENS: 1})
        self.num_lives = 0
        self.num_open = 0
        self.is_held: asyncio.Event | None = None
        self.kernel_class = kernel_class
        self.begin()

    def begin(self) -> None:
        self.num_lives += 1
        self.model = MODEL
        self.life = WorkerLife(f"{self.address}, life {self.num_lives}", "weights", self.kernel_class)
        self.changes.notify()

    def stop(self) -> None:
        self.model = None
        self.changes.notify()

    def die(self) -> None:
        self.stop()
        self.num_lives += 1

    def open_stream(self, setup: SessionSetup) -> TargetStream:
        self.num_open += 1
        return Stream(self, setup, self.num_lives)


@dataclass
class Stream:
    """A stream of one life of a target."""

    target: Target
    setup: SessionSetup
    life: int
    held: list[int] = field(default_factory=list)

    async def verify(
        self, position: int, token_ids: Sequence[int], proposal: Proposal, ahead: Plan, timeout_seconds: float
    ) -> Verdict:
        self.target.world.check_memory(self.target)
        event = self.target.world.next_event(self.target)
        await asyncio.sleep(0)
        if self.target.is_held is not None:
            await self.target.is_held.wait()
        if self.life != self.target.num_lives:
            raise WorkerLostError("TARGET_UNAVAILABLE", "it died")
        if event == "full":
            raise WorkerFullError("CACHE_FULL", "no room")
        assert position <= len(self.held), "the coordinator counted on tokens that the target does not hold"
        session = [*self.held[:position], *token_ids]
        self.held = [*session, *proposal.token_ids]
        if event == "late":
            raise WorkerLateError("TARGET_LATE", "late")
        accepted = 0
        for token in proposal.token_ids:
            if token != next_token(self.held[: len(session) + accepted], self.setup):
                break
            accepted += 1
        own = next_token(self.held[: len(session) + accepted], self.setup)
        return Verdict(accepted, own, len(self.held))

    async def proposal(self, timeout_seconds: float) -> Part:
        raise AssertionError("this target proposes nothing")

    def close(self) -> None:
        self.target.num_open -= 1


class World:
    """Targets, and what happens to them: an event at each verify, to a target by its number; then all goes well."""

    def __init__(
        self,
        num_targets: int,
        events: Sequence[tuple[str, int]],
        kernel_classes: Sequence[str] = (),
        cache_bytes: int = 2**40,
    ) -> None:
        self.events = list(events)
        classes = [*kernel_classes, *["cpu"] * num_targets]
        self.targets = [Target(i, self, kernel_class=classes[i], cache_bytes=cache_bytes) for i in range(num_targets)]

    def check_memory(self, target: Target) -> None:
        """Check that no more sessions are open at a target than its memory holds."""
        assert target.num_open * (len(PROMPT) + 1) <= target.cache_bytes

    def next_event(self, asked: Target) -> str:
        """Do the next event; return it if it happens to the target that was asked."""
        kind, number = self.events.pop(0) if self.events else ("ok", 0)
        target = self.targets[number % len(self.targets)]
        match kind:
            case "dies" if target.model is not None:
                target.die()
            case "stops" if target.model is not None:
                target.stop()
            case "comes back" if target.model is None:
                target.begin()
        if all(each.model is None for each in self.targets):
            asyncio.get_running_loop().call_soon(target.begin)
        return kind if target is asked else "ok"


def own_text(seed: int, max_tokens: int) -> list[int]:
    """Return the text of the target alone."""
    setup = SessionSetup("s", Sampling(seed=seed), namespace=b"")
    token_ids = list(PROMPT)
    while len(token_ids) < len(PROMPT) + max_tokens:
        token_ids.append(next_token(token_ids, setup))
        if token_ids[-1] == END_TOKEN:
            break
    return token_ids[len(PROMPT) :]


async def generate(coordinator: Coordinator, seed: int, max_tokens: int) -> list[int]:
    request = GenerationRequest(list(PROMPT), client=f"{seed % 2}", sampling=Sampling(seed=seed), max_tokens=max_tokens)
    said: list[int] = []
    async for emission in Generation(coordinator, request).emissions():
        said += [token.token_id for token in emission.tokens]
    return said


def coordinator_of(world: World, *, max_sessions: int = 32, recovery_seconds: float = 30.0) -> Coordinator:
    values = {"draft": "none", "max_sessions": max_sessions, "target_recovery_seconds": recovery_seconds}
    return Coordinator(
        CoordinatorSettings.model_validate(values),
        CoordinatorMetrics(CollectorRegistry()),
        model=MODEL,
        tokenizer=byte_tokenizer(),
        targets=Workers(world.targets),
        sessions=new_store(),
        drafts=Workers([RemoteWorker[DraftStream]("DRAFT_NOT_CONFIGURED")]),
    )


def check_that_nothing_is_left(coordinator: Coordinator, world: World) -> None:
    """Check that no session holds anything after its end."""
    assert coordinator.admission.num_running == coordinator.admission.num_queued == 0
    for replica in coordinator.replicas.all:
        capacity = replica.capacity
        assert (capacity.num_running, capacity.reserved_bytes, capacity.prefilling_tokens) == (0, 0, 0)
        assert not replica.planner.running.sessions
    assert [target.num_open for target in world.targets] == [0] * len(world.targets)


kinds = st.sampled_from(["ok", "ok", "ok", "dies", "stops", "comes back", "full", "late"])
events = st.lists(st.tuples(kinds, st.integers(0, 2)), max_size=40)


@settings(max_examples=200)
@given(
    st.integers(1, 3),
    events,
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(1, 3),
    st.sampled_from([50, 90, 200, 2**40]),  # of which a session takes 11 to 50
)
@example(2, [("ok", 0), ("dies", 0), ("ok", 0), ("dies", 1), ("ok", 0), ("comes back", 0)], 2, 30, 32, 2**40)
@example(2, [("ok", 0), ("stops", 0), ("late", 1), ("full", 0)], 3, 30, 1, 2**40)
@example(2, [("full", 0), ("stops", 1), ("stops", 1)], 2, 21, 3, 50)  # the one that was left is the last one
def test_texts_are_the_targets_own_whatever_happens_to_targets(
    num_targets: int,
    events: list[tuple[str, int]],
    num_sessions: int,
    max_tokens: int,
    max_sessions: int,
    cache_bytes: int,
) -> None:
    async def drive() -> None:
        world = World(num_targets, events, cache_bytes=cache_bytes)
        coordinator = coordinator_of(world, max_sessions=max_sessions)
        sessions = [generate(coordinator, seed, max_tokens) for seed in range(num_sessions)]
        async with asyncio.timeout(20):  # below the time that a session waits for a target
            texts = await asyncio.gather(*sessions, return_exceptions=True)
        for seed, text in enumerate(texts):
            lost_too_often = isinstance(text, UnavailableError) and text.reason == "TARGET_UNAVAILABLE"
            assert text == own_text(seed, max_tokens) or lost_too_often
        check_that_nothing_is_left(coordinator, world)

    asyncio.run(drive())


async def test_a_session_moves_at_once_when_its_target_dies_or_stops() -> None:
    for event in ("dies", "stops"):
        world = World(2, [("ok", 0), ("ok", 0), (event, 0)])
        coordinator = coordinator_of(world)
        async with asyncio.timeout(5):
            assert await generate(coordinator, 1, 30) == own_text(1, 30)
        assert world.targets[0].model is None, "it moved before the other was back"
        check_that_nothing_is_left(coordinator, world)


async def test_a_session_does_not_move_to_a_target_that_rounds_differently() -> None:
    world = World(2, [("ok", 0), ("ok", 0), ("dies", 0)], ["cpu", "gpu"])
    coordinator = coordinator_of(world)
    generating = asyncio.ensure_future(generate(coordinator, 1, 30))
    await asyncio.sleep(0.2)
    assert not generating.done()
    assert world.targets[1].num_open == 0
    world.targets[0].begin()
    async with asyncio.timeout(5):
        assert await generating == own_text(1, 30)


async def test_sessions_are_spread_over_the_targets() -> None:
    world = World(3, [])
    coordinator = coordinator_of(world)
    most = [0, 0, 0]

    async def watch() -> None:
        while True:
            for i, target in enumerate(world.targets):
                most[i] = max(most[i], target.num_open)
            await asyncio.sleep(0)

    watching = asyncio.ensure_future(watch())
    await asyncio.gather(*(generate(coordinator, seed, 20) for seed in range(9)))
    watching.cancel()
    assert min(most) >= 2, most


async def test_a_client_that_goes_while_its_session_moves_frees_everything() -> None:
    """Both targets are full, so the move waits."""
    world = World(2, [("ok", 0), ("ok", 1), ("dies", 0)])
    coordinator = coordinator_of(world, max_sessions=1)
    sessions = [asyncio.ensure_future(generate(coordinator, seed, 2000)) for seed in range(2)]
    for _ in range(200):
        await asyncio.sleep(0)
    for session in sessions:
        session.cancel()
    await asyncio.gather(*sessions, return_exceptions=True)
    check_that_nothing_is_left(coordinator, world)


async def test_clients_share_targets_whose_costs_are_known() -> None:
    """With fewer sessions than targets, the time of a token is that of one session."""
    world = World(2, [])
    for target in world.targets:
        target.step_costs = StepCosts({n: {1: 0.03, 8: 0.03 + 0.01 * n} for n in (1, 8)})
    coordinator = coordinator_of(world)
    for seeds in ((0, 2, 4, 6), (0, 1, 2, 3)):
        texts = await asyncio.gather(*(generate(coordinator, seed, 40) for seed in seeds))
        assert texts == [own_text(seed, 40) for seed in seeds]
    check_that_nothing_is_left(coordinator, world)


async def test_a_session_waits_for_a_full_target_for_longer_than_for_a_lost_one() -> None:
    world = World(2, [*[("ok", 0)] * 6, ("dies", 0)])
    coordinator = coordinator_of(world, max_sessions=1, recovery_seconds=0.05)
    release = asyncio.Event()
    other = world.targets[1]
    other.is_held = release
    generating = [asyncio.ensure_future(generate(coordinator, seed, 30)) for seed in (2, 7)]
    await asyncio.sleep(0.3)
    assert not any(task.done() for task in generating)
    release.set()
    assert await asyncio.gather(*generating) == [own_text(seed, 30) for seed in (2, 7)]


class Places:
    """Places at targets with this memory, the first of which is preferred."""

    def __init__(self, *num_bytes: int, max_sessions: int) -> None:
        self.capacities = [
            Capacity(partial(int, size), add, max_sessions=max_sessions, seconds_per_token=lambda n: 1.0)
            for size in num_bytes
        ]
        self.last_first = False
        self.admission = Admission(Capacities(lambda: self.capacities, self._choose), max_queued=9, clock=lambda: 0.0)
        self.open = ExitStack()

    def _choose(self, place: Place, capacities: Sequence[Capacity]) -> Capacity:
        return capacities[-1 if self.last_first else 0]

    def come(self, client: str, num_tokens: int) -> tuple[Place, asyncio.Future[None]]:
        place = self.open.enter_context(self.admission.place(client))
        return place, asyncio.ensure_future(self.admission.admit(place, num_tokens))


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_session_that_waits_to_move_keeps_no_request_from_another_target() -> None:
    places = Places(100, 100, max_sessions=10)
    first, second = places.capacities
    moving, _ = places.come("x", 50)
    await settle()
    places.last_first = True
    places.come("z", 90)
    await settle()
    places.last_first = False
    move = asyncio.ensure_future(places.admission.move(moving, lambda capacity: capacity is second))
    await settle()
    for client in ("y", "x"):
        _, admitted = places.come(client, 10)
        await settle()
        assert admitted.done()
    assert not move.done()
    assert (first.num_running, second.num_running) == (2, 1), (
        "the memory of the full target waits for the one that moves"
    )
    move.cancel()
    places.open.close()
    assert (first.reserved_bytes, second.reserved_bytes, first.num_running, second.num_running) == (0, 0, 0, 0)


async def test_a_paused_session_continues_at_its_target_although_that_is_full() -> None:
    places = Places(100, 100, max_sessions=2)
    paused, _ = places.come("y", 10)
    await settle()
    places.admission.pause(paused)
    for _ in range(2):
        places.come("x", 10)
    await settle()
    assert [capacity.num_running for capacity in places.capacities] == [2, 0]
    await asyncio.wait_for(places.admission.next_round(paused), 5)
    places.open.close()
