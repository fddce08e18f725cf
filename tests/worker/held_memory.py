"""The memory that sessions hold, over the counted memory, on which budgets, admission and prefix cache rely."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

from specd.worker.engine.forward import BareCache, forward
from specd.worker.engine.jobs import Feed
from specd.worker.layers import recurrent
from specd.worker.layers.session_layers import SessionLayers
from tests.worker.models import TINY_VOCABULARY_SIZE

MOST_HELD = 1.25  # times what is counted
CHUNK = recurrent.MOST_TOKENS + 8
PROMPT_LENGTHS = (3 * CHUNK, 3 * CHUNK + 5, 4 * CHUNK - 1)
# How many tokens the sessions go back by after each round of four, by turns.
BACK = ((0, 3, 1), (2, 0, 0), (0, 1, 0))


@contextmanager
def exact_allocations() -> Iterator[None]:
    """Make MLX free unused buffers: otherwise it reuses buffers that are larger than requested."""
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


def check_held_memory(make_session: Any) -> None:
    """Check that sessions of a network hold hardly more memory than they count."""
    with exact_allocations():
        shares(make_session, before=0)  # what a network makes once
        gc.collect()
        assert max(shares(make_session, before=mx.get_active_memory())) <= MOST_HELD
