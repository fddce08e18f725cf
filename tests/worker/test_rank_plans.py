"""The plans of rank 0: a follower that interprets them holds what rank 0 holds, after any operations."""

from __future__ import annotations

import gc
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specd.v1.ranks_pb2 import Operation, StepPlan
from specd.worker.engine.forward import BareCache, forward
from specd.worker.engine.jobs import Feed
from specd.worker.layers.session_layers import SessionLayers
from specd.worker.model.loader import LoadedModel
from specd.worker.session.prefix_cache import PrefixCache
from specd.worker.session.session_cache import SessionCache
from tests.worker.driving import Chunks, feed_now, finish
from tests.worker.in_memory_ranks import InMemoryRanks, RanksHaveEndedError
from tests.worker.models import SAVED, TINY_VOCABULARY_SIZE

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {**SAVED["gemma3_text"], "sliding_window": 8},
    "mamba2": SAVED["mamba2"],
}
MOST_SESSIONS = 4

tokens = st.lists(st.integers(0, TINY_VOCABULARY_SIZE - 1), min_size=1, max_size=9)


@cache
def ranks_of(kind: str) -> InMemoryRanks:
    return InMemoryRanks(kind, **KINDS[kind])


def feed(model: LoadedModel, sessions: list[SessionLayers], fed: list[list[int]], *, wants_logits: bool = True) -> None:
    """Feed tokens to some sessions in one pass, as a step of the engine does."""
    feeds = [
        Feed(BareCache(model.network, layers, model.batches), mx.array(ids, mx.uint32), wants_logits)
        for layers, ids in zip(sessions, fed, strict=True)
    ]
    forward(feeds)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_follower_holds_what_rank_0_holds(kind: str, data: st.DataObject) -> None:
    ranks = ranks_of(kind)
    sessions: list[SessionLayers] = [SessionLayers(ranks.leader.network)]
    for _ in range(data.draw(st.integers(1, 12))):
        operate(ranks, sessions, data)
        del sessions[:-MOST_SESSIONS]
    gc.collect()  # what an example that failed has left
    ranks.assert_same(sessions)


def operate(ranks: InMemoryRanks, sessions: list[SessionLayers], data: st.DataObject) -> None:
    operation = data.draw(st.sampled_from(["begin", "feed", "feed", "feed", "rewind", "copy", "drop"]))
    chosen = data.draw(st.integers(0, len(sessions) - 1)) if sessions else 0
    if operation == "begin" or not sessions:
        sessions.append(SessionLayers(ranks.leader.network))
    elif operation == "feed":
        some = [each for each in sessions if data.draw(st.booleans())] or sessions[:1]
        feed(ranks.leader, some, [data.draw(tokens) for _ in some], wants_logits=data.draw(st.booleans()))
    elif operation == "rewind":
        sessions[chosen].rewind(data.draw(st.integers(0, sessions[chosen].num_fed)))
    elif operation == "copy" and sessions[chosen].num_fed:
        wanted = data.draw(st.integers(1, sessions[chosen].num_fed))
        if position := sessions[chosen].can_serve(wanted):
            sessions.append(sessions[chosen].copy(position))
    elif operation == "drop":
        del sessions[chosen]


@given(data=st.data())
def test_a_follower_keeps_cached_prefixes_as_long_as_rank_0(data: st.DataObject) -> None:
    """Sessions take from the prefix cache and leave their layers there, and memory runs short."""
    ranks = ranks_of("llama")
    entry_bytes = 2 * 2 * 2 * 8 * 256 * 4  # layers, keys and values, heads, size, rows of a buffer, bytes of a float
    prefixes = PrefixCache(data.draw(st.integers(0, 4)) * entry_bytes)
    for _ in range(data.draw(st.integers(1, 8))):
        session = SessionCache(ranks.leader, prefixes)
        for _ in range(data.draw(st.integers(1, 3))):
            position = data.draw(st.integers(0, session.cached_len))
            pending = finish(session.prefill(position, data.draw(tokens), Chunks(3)))
            feed_now(session, pending)
            session.commit(pending)
        session.keep()
        if data.draw(st.booleans()):
            prefixes.shrink(data.draw(st.integers(0, 2 * entry_bytes)))
        gc.collect()
        ranks.assert_same([session.layers, *(entry.layers for entry in prefixes._entries)])


def test_an_idle_follower_learns_what_was_dropped() -> None:
    ranks = InMemoryRanks()
    session = SessionLayers(ranks.leader.network)
    feed(ranks.leader, [session], [[1, 2, 3]])
    assert len(ranks.follower.interpreter.layers) == 1
    del session
    gc.collect()
    ranks.ranks.flush()
    assert not ranks.follower.interpreter.layers
    num_plans = ranks.follower.num_plans
    ranks.ranks.flush()
    assert ranks.follower.num_plans == num_plans  # nothing is sent where there is nothing to say


@pytest.mark.parametrize("wants_logits", [True, False])
def test_a_wrong_number_on_one_rank_ends_all(wants_logits: bool) -> None:
    """A weight of the follower differs in its last bit, as if a sum had come over a bad link."""
    ranks = InMemoryRanks()
    session = SessionLayers(ranks.leader.network)
    feed(ranks.leader, [session], [[1, 2, 3]], wants_logits=wants_logits)
    held: Any = ranks.follower.interpreter._network
    norm = held.layers[0].input_layernorm
    norm.weight = (norm.weight.view(mx.uint32) ^ 1).view(mx.float32)
    with pytest.raises(RanksHaveEndedError, match="the follower has other logits in step 2"):
        feed(ranks.leader, [session], [[4]], wants_logits=wants_logits)


def test_an_answer_with_another_checksum_ends_all_ranks() -> None:
    ranks = InMemoryRanks()
    ranks.follower.flips_a_bit = True
    with pytest.raises(RanksHaveEndedError, match="what connects the ranks changes numbers"):
        feed(ranks.leader, [SessionLayers(ranks.leader.network)], [[1]])


def test_a_fault_of_a_pass_ends_all_ranks() -> None:
    ranks = InMemoryRanks()
    session = SessionLayers(ranks.leader.network)
    feed(ranks.leader, [session], [[1, 2]])

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    ranks.ranks._passes.evaluate = fail  # type: ignore[method-assign, union-attr]
    with pytest.raises(RanksHaveEndedError, match="step 2 failed: RuntimeError"):
        feed(ranks.leader, [session], [[3]])


def test_a_plan_that_does_not_fit_is_an_error() -> None:
    interpreter = InMemoryRanks().follower.interpreter
    opened = Operation(kind=Operation.KIND_OPEN, handle=7)
    interpreter.run(StepPlan(step=1, operations=[opened]))
    with pytest.raises(ValueError, match="session 7 cannot be rewound to 3"):
        interpreter.run(StepPlan(step=1, operations=[Operation(kind=Operation.KIND_REWIND, handle=7, position=3)]))
    with pytest.raises(ValueError, match="unknown operation 0"):
        interpreter.run(StepPlan(step=1, operations=[Operation(handle=7)]))
    with pytest.raises(KeyError):
        interpreter.run(StepPlan(step=1, operations=[Operation(kind=Operation.KIND_DROP, handle=8)]))
