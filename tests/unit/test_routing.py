"""The choice of a target: by the prompts that are cached there, and by the work that waits there."""

from __future__ import annotations

import gc
import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mean
from weakref import ref

from hypothesis import given
from hypothesis import strategies as st

from coordinator.core import Exchange
from coordinator.replicas.prefix_estimate import BLOCK_TOKENS, CachedPart, PrefixEstimate, blocks_of
from coordinator.replicas.replica import DraftFacts, Replica
from coordinator.replicas.replicas import Replicas
from coordinator.sessions.capacities import Capacities
from coordinator.sessions.capacity import Capacity
from coordinator.sessions.place import ClientPlaces, Place, Prompt
from coordinator.workers.remote_worker import RemoteWorker, WorkerLife
from coordinator.workers.verifier import TargetStream
from coordinator.workers.workers import Workers
from specd.model_info import ModelInfo
from specd.step_costs import StepCosts

MODEL = ModelInfo("m", "llama", "", "", 1000, 100_000, (0,), "float32", "cpu")
# A step takes 30 ms, and a little longer for each session and each token of a prompt.
COSTS = {n: {width: 0.028 + 0.002 * n + 0.0005 * (width - 1) for width in (1, 64)} for n in (1, 16)}
SECONDS_PER_PROMPT_TOKEN = 0.0005
CACHED_TOKENS = 40_000


class CachingWorker(RemoteWorker[TargetStream]):
    """A target with a prefix cache of blocks, the least recently used first."""

    def __init__(self, number: int) -> None:
        super().__init__("TARGET_UNAVAILABLE", MODEL, f"target {number}")
        self.step_costs = StepCosts(COSTS)
        self.cache_bytes = 2**40
        self.prefix_cache_tokens = CACHED_TOKENS
        self.blocks: OrderedDict[bytes, None] = OrderedDict()
        self.busy_seconds = 0.0

    def num_cached(self, blocks: Sequence[bytes]) -> int:
        return BLOCK_TOKENS * len([*itertools.takewhile(self.blocks.__contains__, blocks)])

    def hold(self, blocks: Sequence[bytes]) -> None:
        for block in reversed(blocks):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > CACHED_TOKENS // BLOCK_TOKENS:
            self.blocks.popitem(last=False)


def replicas_of(workers: Sequence[CachingWorker], clock: Callable[[], float] = lambda: 0.0) -> Replicas:
    def replica_of(worker: RemoteWorker[TargetStream]) -> Replica:
        return Replica(worker, draft=DraftFacts(lambda: None, lambda: ()), max_sessions=32, clock=clock)

    return Replicas(Workers(workers), replica_of, lambda replica: None)


Choose = Callable[[Place], CachingWorker]


@dataclass
class Conversations:
    """Turns of 64 conversations with eight system prompts, at four targets: what is computed where, and how long."""

    seed: int
    workers: list[CachingWorker] = field(default_factory=lambda: [CachingWorker(i) for i in range(4)])
    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0

    def run(self, replicas: Replicas | None, choose: Choose | None = None) -> tuple[float, float]:
        """Return the part of prompt tokens that were cached, and the largest load over the mean.

        Replicas choose the target, or else `choose` does.
        """
        rng = random.Random(self.seed)
        capacities = Capacities(replicas.capacities, replicas.choose) if replicas is not None else None
        systems = [[rng.randrange(1000) for _ in range(512)] for _ in range(8)]
        texts = [list(rng.choices(systems, [1 / (i + 1) for i in range(8)])[0]) for _ in range(64)]
        client, number = ClientPlaces(0), itertools.count()
        events: list[tuple[float, int, Callable[[float], None]]] = []

        def schedule(at: float, happen: Callable[[float], None]) -> None:
            heapq.heappush(events, (at, next(number), happen))

        def begin(conversation: int, turn: int, now: float) -> None:
            text = texts[conversation]
            text += [rng.randrange(1000) for _ in range(rng.randrange(20, 400))]
            num_generated = rng.randrange(20, 300)
            place = Place(client, num_bytes=1, prompt=Prompt(len(text), 300, blocks_of(text, namespace=b"")))
            if capacities is not None and replicas is not None:
                capacities.reserve(place)
                assert place.capacity is not None
                place.capacity.num_running += 1
                worker = replicas.of(place.capacity).worker
            else:
                assert choose is not None
                worker = choose(place)
            assert isinstance(worker, CachingWorker)
            num_cached = worker.num_cached(place.prompt.blocks)
            worker.hold(place.prompt.blocks)
            self.num_prompt_tokens += len(text)
            self.num_reused_tokens += num_cached
            prefill = SECONDS_PER_PROMPT_TOKEN * (len(text) - num_cached)
            # Sessions share steps, so each costs a part of one.
            worker.busy_seconds += prefill + 0.002 * num_generated
            if capacities is not None and replicas is not None and place.capacity is not None:
                exchange = Exchange(compute_seconds=prefill)
                replicas.of(place.capacity).prefilled(place, num_cached, exchange)
                schedule(now + prefill, lambda _: capacities.prefilled(place))

            def end(now: float) -> None:
                text.extend(rng.randrange(1000) for _ in range(num_generated))
                if capacities is not None and place.capacity is not None:
                    place.capacity.num_running -= 1
                    capacities.release(place)
                if turn < 7:
                    think = rng.expovariate(1 / 5)
                    schedule(now + think, partial(begin, conversation, turn + 1))

            schedule(now + prefill + 0.03 * num_generated, end)

        for conversation in range(64):
            schedule(rng.random() * 10, partial(begin, conversation, 0))
        while events:
            now, _, happen = heapq.heappop(events)
            happen(now)
        loads = [worker.busy_seconds for worker in self.workers]
        return self.num_reused_tokens / self.num_prompt_tokens, max(loads) * len(loads) / sum(loads)


def longest_match(workers: Sequence[CachingWorker], place: Place) -> CachingWorker:
    return max(workers, key=lambda each: (each.num_cached(place.prompt.blocks), -each.busy_seconds))


def next_in_turn(workers: Iterator[CachingWorker], place: Place) -> CachingWorker:
    return next(workers)


def test_prompts_go_where_they_are_cached_and_the_load_is_even() -> None:
    """Beside an oracle that knows each cache and takes the longest match, and beside turns for each target."""
    ratios, loads, turns = [], [], []
    for seed in range(5):
        ours = Conversations(seed)
        hit_rate, load = ours.run(replicas_of(ours.workers))
        oracle, turn = Conversations(seed), Conversations(seed)
        best, _ = oracle.run(None, partial(longest_match, oracle.workers))
        by_turns, _ = turn.run(None, partial(next_in_turn, itertools.cycle(turn.workers)))
        ratios.append(hit_rate / best)
        turns.append(by_turns / best)
        loads.append(load)
    print(f"of the oracle's hit rate: {ratios}, in turns {turns}; load, largest over mean: {loads}")
    assert mean(ratios) >= 0.9
    assert max(loads) <= 1.25
    assert max(turns) < 0.9, "the simulation does not tell routers apart"


tokens = st.lists(st.integers(0, 3), max_size=5 * BLOCK_TOKENS)


@given(tokens, tokens, st.integers(0, 5 * BLOCK_TOKENS))
def test_blocks_are_equal_as_far_as_prompts_are(one: list[int], other: list[int], num_common: int) -> None:
    other = [*one[:num_common], *other]
    common = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))])
    blocks, others = blocks_of(one, namespace=b"a"), blocks_of(other, namespace=b"a")
    assert len(blocks) == len(one) // BLOCK_TOKENS
    equal = [a == b for a, b in zip(blocks, others, strict=False)]
    assert equal == [(i + 1) * BLOCK_TOKENS <= common for i in range(len(equal))]
    for strangers in (blocks_of(one, namespace=b"b"), blocks_of(one, namespace=b"a", source=[1])):
        assert not set(blocks) & set(strangers)


def test_the_estimate_forgets_as_the_target_does() -> None:
    estimate = PrefixEstimate(lambda: 4 * BLOCK_TOKENS)
    estimate.add([b"a1", b"a2"])
    estimate.add([b"b1", b"b2"])
    assert estimate.find([b"a1", b"a2", b"a3"]) == CachedPart(2 * BLOCK_TOKENS, 1)
    estimate.add([b"c1"])
    assert estimate.find([b"a1", b"a2"]) == CachedPart(BLOCK_TOKENS, 1), "the end of the oldest goes first"


def test_a_verdict_that_reused_less_than_expected_corrects_the_estimate() -> None:
    estimate = PrefixEstimate(lambda: 100 * BLOCK_TOKENS)
    estimate.add([b"a1"])
    estimate.add([b"b1", b"b2"])
    estimate.add([b"c1"])
    part = estimate.find([b"b1", b"b2"])
    estimate.correct(part, part.num_tokens)
    assert estimate.find([b"a1"]).num_tokens == BLOCK_TOKENS
    estimate.correct(part, 0)
    assert estimate.find([b"a1"]) == estimate.find([b"b1", b"b2"]) == CachedPart()
    assert estimate.find([b"c1"]).num_tokens == BLOCK_TOKENS


def test_a_target_that_begins_anew_has_nothing_cached() -> None:
    workers = [CachingWorker(i) for i in range(2)]
    replicas = replicas_of(workers)
    prompt = Prompt(1024, 10, blocks_of(range(1024), namespace=b""))
    capacities = replicas.capacities()
    first = replicas.choose(Place(ClientPlaces(0), prompt=prompt), capacities)
    assert replicas.choose(Place(ClientPlaces(0), prompt=prompt), capacities) is first
    replicas.of(first).worker.life = WorkerLife("another life")
    other = next(capacity for capacity in capacities if capacity is not first)
    replicas.choose(Place(ClientPlaces(0), prompt=prompt), [other])
    assert replicas.choose(Place(ClientPlaces(0), prompt=prompt), capacities) is other


def test_a_target_that_was_slow_for_a_while_gets_sessions_again() -> None:
    """Others that are faster would keep all sessions, so nothing would show that it has recovered."""
    now = 0.0
    replicas = replicas_of([CachingWorker(i) for i in range(2)], lambda: now)
    capacities = replicas.capacities()
    slow, other = capacities
    for capacity, seconds in ((slow, 10.0), (other, 1.0)):
        place = Place(ClientPlaces(0), prompt=Prompt(1000, 1))
        assert replicas.choose(place, [capacity]) is capacity
        replicas.of(capacity).prefilled(place, 0, Exchange(compute_seconds=seconds))

    def chosen() -> set[Capacity]:
        return {replicas.choose(Place(ClientPlaces(0), prompt=Prompt(1000, 1)), capacities) for _ in range(10)}

    assert chosen() == {other}
    now = 59.0
    assert chosen() == {other}
    now = 61.0
    assert chosen() == {slow, other}, "and its one session shows that it is still slow"


def test_a_target_that_is_removed_is_forgotten_when_its_sessions_have_ended() -> None:
    workers = [CachingWorker(i) for i in range(3)]
    replicas = replicas_of(workers)
    capacities = Capacities(replicas.capacities, replicas.choose)
    place = Place(ClientPlaces(0), num_bytes=1, prompt=Prompt(10, 10))
    capacities.reserve(place)
    assert place.capacity is not None
    gone, removed = replicas.of(place.capacity).worker, ref(replicas.of(place.capacity))
    replicas.workers.remove(gone)
    assert replicas.of(place.capacity).worker is gone, "its session still has memory there"
    capacities.release(place)
    replicas.workers.remove(next(worker for worker in workers if worker is not gone))
    gc.collect()
    assert removed() is None
    assert len(replicas.all) == 1
