"""What sessions hold is what they count: budgets, admission and the prefix cache go by it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from specd.worker.cache.layers import recurrent
from specd.worker.cache.layers.owned import owned
from specd.worker.cache.layers.session_layers import SessionLayers
from specd.worker.engine.forward import BareCache, Feed, bare_cache, enable_batches, forward
from specd.worker.model.t5.arguments import Arguments
from specd.worker.model.t5.network import T5
from tests.worker.families import make_network
from tests.worker.family_configs import NETWORKS
from tests.worker.models import TINY_VOCABULARY_SIZE
from tests.worker.t5_models import CONFIG

MOST_HELD = 1.25  # times what is counted
CHUNK = recurrent.MOST_TOKENS + 8
PROMPT_LENGTHS = (3 * CHUNK, 3 * CHUNK + 5, 4 * CHUNK - 1)
# How many tokens the sessions go back by after each round of four, by turns.
BACK = ((0, 3, 1), (2, 0, 0), (0, 1, 0))


@pytest.fixture(autouse=True)
def exact_allocations() -> Iterator[None]:
    """Let MLX free what is not in use: otherwise it reuses buffers that are larger than what is asked for."""
    before = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(before)


def feed(sessions: list[BareCache], tokens: list[list[int]]) -> None:
    feeds = [Feed(session, mx.array(ids)) for session, ids in zip(sessions, tokens, strict=True)]
    mx.eval(forward(feeds))


def prefilled(session: BareCache, length: int) -> BareCache:
    tokens = np.random.default_rng(length).integers(0, TINY_VOCABULARY_SIZE, length).tolist()
    for begin in range(0, length, CHUNK):
        feed([session], [tokens[begin : begin + CHUNK]])
        mx.eval(session.layers.arrays)
    return session


def shares(make_session: Any, *, before: int) -> list[float]:
    """Return held over counted memory: after prompts, after rounds together, of one that is left, and of its copy."""
    found = []

    def look(*of: SessionLayers) -> None:
        gc.collect()
        found.append((mx.get_active_memory() - before) / sum(layers.nbytes for layers in of))

    sessions = [prefilled(make_session(), length) for length in PROMPT_LENGTHS]
    look(*(session.layers for session in sessions))
    for back in BACK * 2:
        feed(sessions, [[1, 2, 3, 4]] * 3)
        for session, count in zip(sessions, back, strict=True):
            session.layers.rewind(session.layers.num_fed - count)
    feed(sessions, [[1]] * 3)
    look(*(session.layers for session in sessions))
    del sessions[1:], session
    look(sessions[0].layers)
    copy = sessions[0].layers.copy(sessions[0].layers.can_serve(sessions[0].layers.num_fed - 1))
    del sessions[:]
    look(copy)
    return found


def check(make_session: Any) -> None:
    shares(make_session, before=0)  # what a network makes once
    gc.collect()
    assert max(shares(make_session, before=mx.get_active_memory())) <= MOST_HELD


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_sessions_of_a_family_hold_what_they_count(name: str) -> None:
    network = make_network(name)
    batches = enable_batches(network)
    check(lambda: BareCache(network, SessionLayers(network), batches))


def test_sessions_of_a_t5_hold_what_they_count() -> None:
    network = T5(Arguments.from_dict(CONFIG))
    mx.eval(network.parameters())
    batches = enable_batches(network)
    check(lambda: bare_cache(network, batches=batches, source=range(300)))


@given(
    arrays.arrays(
        np.float32,
        arrays.array_shapes(min_dims=3, max_dims=4, max_side=24),
        elements=st.floats(width=32, allow_nan=False),
        fill=st.just(-0.0),
    ),
    st.data(),
)
def test_an_owned_array_has_the_same_bits_and_memory_of_its_own(
    values: np.ndarray[Any, Any], data: st.DataObject
) -> None:
    axis = data.draw(st.integers(0, values.ndim - 1))
    begin = data.draw(st.integers(0, values.shape[axis] - 1))
    end = data.draw(st.integers(begin, values.shape[axis]))
    part = tuple(slice(begin, end) if i == axis else slice(None) for i in range(values.ndim))
    whole = mx.array(values)
    own = owned(whole[part])
    mx.eval(own)
    np.testing.assert_array_equal(np.array(own).view(np.uint32), np.ascontiguousarray(values[part]).view(np.uint32))
    held = mx.get_active_memory()
    del own
    assert held - mx.get_active_memory() == values[part].nbytes
