"""Every family of mlx-lm with a tiny configuration: in rounds, alone and together, the tokens are mlx-lm's."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from specd.worker.engine.forward import BareCache, enable_batches, forward, rewinds_exactly
from specd.worker.engine.jobs import Feed
from specd.worker.layers.chunk import ChunkCache
from specd.worker.layers.full import FullCache
from specd.worker.layers.parts import CacheParts, flatten
from specd.worker.layers.recurrent import RecurrentCache
from specd.worker.layers.session_layers import SessionLayers
from specd.worker.layers.snapshots import SnapshotCache
from specd.worker.layers.window import WindowCache
from tests.thorough import examples
from tests.worker.families import make_network
from tests.worker.family_configs import NETWORKS
from tests.worker.family_kinds import KINDS, WINDOW
from tests.worker.models import TINY_VOCABULARY_SIZE

MAX_TOKENS = 24
PROMPT_LENGTHS = (WINDOW - 1, 60, 300)
# Rounding, over the largest logit. DeepSeek V4.1 rounds what it keeps, so that last bits become steps.
TOLERANCES = {"deepseek_v41": 5e-2}
TOLERANCE = 2e-3
# Noise for the choice of a token, by its position, because an argmax alone often repeats a token.
NOISE = np.random.default_rng(0).gumbel(size=(max(PROMPT_LENGTHS) + 2 * MAX_TOKENS, TINY_VOCABULARY_SIZE))


def choose(logits: np.ndarray[Any, Any], position: int) -> list[int]:
    """Return the tokens from a position on, by the logits [n, vocabulary] of each."""
    noise = logits.std(axis=1, keepdims=True) * NOISE[position : position + len(logits)]
    chosen: list[int] = np.argmax(logits + noise, axis=1).tolist()
    return chosen


@dataclass(frozen=True)
class Expected:
    """The tokens that a network says after a prompt, and the logits [tokens, vocabulary] that they are chosen by."""

    prompt: list[int]
    tokens: list[int]
    logits: np.ndarray[Any, Any]


@cache
def one_by_one(name: str, length: int) -> Expected:
    """Decode with mlx-lm's own caches after a random prompt."""
    network = make_network(name)
    rng = random.Random(length)
    prompt = [rng.randrange(TINY_VOCABULARY_SIZE) for _ in range(length)]
    cache = make_prompt_cache(network)
    tokens: list[int] = []
    rows = [np.array(network(mx.array([prompt]), cache=cache)[0, -1:])]
    while len(tokens) < MAX_TOKENS:
        tokens += choose(rows[-1], length + len(tokens))
        rows.append(np.array(network(mx.array([tokens[-1:]]), cache=cache)[0]))
    return Expected(prompt, tokens, np.concatenate(rows[:-1]))


class Session:
    """A session that is decoded in rounds, with a draft that guesses most tokens."""

    def __init__(self, network: Any, batches: bool, expected: Expected, tolerance: float) -> None:
        self.cache = BareCache(network, SessionLayers(network), batches)
        self.tokens: list[int] = []
        self._expected, self._random = expected, random.Random(len(expected.prompt))
        self._tolerance = tolerance * float(np.abs(expected.logits).max())
        self._pending = expected.prompt
        self._proposal: list[int] = []

    @property
    def is_done(self) -> bool:
        return len(self.tokens) >= MAX_TOKENS

    def next_feed(self) -> Feed:
        count = self._random.choice((0, 1, 4, 8)) if self.tokens else 0
        right = self._expected.tokens[len(self.tokens) : len(self.tokens) + count]
        self._proposal = [
            token if self._random.random() < 0.8 else self._random.randrange(TINY_VOCABULARY_SIZE) for token in right
        ]
        return Feed(self.cache, mx.array([*self._pending, *self._proposal]))

    def take(self, logits: mx.array) -> None:
        """Append the tokens that the logits choose, and compare both with the expected ones."""
        begin = len(self.tokens)
        rows = np.array(logits[-1 - len(self._proposal) :])
        choices = choose(rows, len(self._expected.prompt) + begin)
        accepted = next((i for i, token in enumerate(self._proposal) if token != choices[i]), len(self._proposal))
        self.tokens += choices[: accepted + 1]
        num_expected = min(accepted + 1, MAX_TOKENS - begin)
        expected = self._expected.logits[begin : begin + num_expected]
        np.testing.assert_allclose(rows[:num_expected], expected, rtol=0, atol=self._tolerance)
        assert self.tokens[:MAX_TOKENS] == self._expected.tokens[: len(self.tokens)]
        held = [*self._expected.prompt, *self.tokens][:-1]
        reached = self.cache.layers.rewind(len(held))
        self._pending = [*held[reached:], self.tokens[-1]]


def decode(sessions: Sequence[Session], at_once: int) -> None:
    """Decode sessions in rounds, some of them at once."""
    for first in range(0, len(sessions), at_once):
        running = list(sessions[first : first + at_once])
        while running := [session for session in running if not session.is_done]:
            outputs = forward([session.next_feed() for session in running])
            for session, logits in zip(running, outputs, strict=True):
                session.take(logits)


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_a_network_says_something(name: str) -> None:
    """A test with one whose logits do not depend on older tokens, or that always says the same, tells little."""
    network = make_network(name)
    tokens = one_by_one(name, PROMPT_LENGTHS[0]).prompt
    others = [(tokens[0] + 1) % TINY_VOCABULARY_SIZE, *tokens[1:]]
    logits, changed = (np.array(network(mx.array([ids]))[0, -1]) for ids in (tokens, others))
    assert np.abs(changed - logits).max() > 5 * TOLERANCES.get(name, TOLERANCE) * np.abs(logits).max()
    assert all(len(set(one_by_one(name, length).tokens)) >= 4 for length in PROMPT_LENGTHS)


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_rounds_give_the_tokens_and_logits_of_mlx_lm(name: str) -> None:
    network = make_network(name)
    assert rewinds_exactly(network)
    expected = [one_by_one(name, length) for length in PROMPT_LENGTHS]
    batches = enable_batches(network)
    for at_once in (1, len(expected)):
        sessions = [Session(network, batches, each, TOLERANCES.get(name, TOLERANCE)) for each in expected]
        decode(sessions, at_once)


def _zeroes_rows(cache: Any, rewind: Callable[[], None]) -> None:
    rewind()
    cache.keys, cache.values = tree_map(mx.zeros_like, (cache.keys, cache.values))


def _leaves_the_state(cache: Any, rewind: Callable[[], None]) -> None:
    state = cache.cache
    rewind()
    cache.cache = state


def _leaves_the_arrays(cache: Any, rewind: Callable[[], None]) -> None:
    arrays = {name: value for name, value in vars(cache).items() if isinstance(value, mx.array)}
    rewind()
    vars(cache).update(arrays)


def _leaves_all_parts(cache: Any, rewind: Callable[[], None]) -> None:
    """Rewind nothing."""


SABOTAGES: dict[type, Callable[[Any, Callable[[], None]], None]] = {
    FullCache: _zeroes_rows,
    WindowCache: _zeroes_rows,
    ChunkCache: _zeroes_rows,
    RecurrentCache: _leaves_the_state,
    SnapshotCache: _leaves_the_arrays,
    CacheParts: _leaves_all_parts,
}


# First those that stand for all kinds of caches.
@pytest.mark.parametrize("name", examples(sorted(NETWORKS, key=lambda name: name not in KINDS), len(KINDS)))
def test_a_broken_rewind_of_any_kind_is_seen(name: str) -> None:
    """The power of the test above: it fails for each kind of cache that a family has, if that does not go back."""
    network = make_network(name)
    caches = SessionLayers(network).caches
    kinds = [kind for kind in SABOTAGES if any(isinstance(cache, kind) for cache in (*caches, *flatten(caches)))]
    assert kinds
    for kind in kinds:
        sessions = [
            Session(network, False, one_by_one(name, length), TOLERANCES.get(name, TOLERANCE))
            for length in PROMPT_LENGTHS[:2]
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, "rewind", _broken(kind))
            with pytest.raises(AssertionError):
                decode(sessions, 1)


def _broken(kind: Any) -> Callable[[Any, int], None]:
    plain, sabotage = kind.rewind, SABOTAGES[kind]

    def rewind(self: Any, position: int) -> None:
        sabotage(self, partial(plain, self, position))

    return rewind


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_passes_free_their_arrays_without_the_cycle_collector(name: str) -> None:
    """A cycle around arrays keeps them until Python has made some thousand objects: hundreds of MiB in a worker."""
    network = make_network(name)
    batches = enable_batches(network)

    def run() -> int:
        """Return how many bytes are in use after a few passes of two sessions, whose caches are gone."""
        caches = [BareCache(network, SessionLayers(network), batches) for _ in range(2)]
        for tokens in ([[1, 2, 3], [4]], [[5], [6]]):
            feeds = [Feed(cache, mx.array(ids)) for cache, ids in zip(caches, tokens, strict=True)]
            mx.eval(forward(feeds))
        caches[0].layers.rewind(2)
        mx.eval(caches[0].layers.copy(caches[0].layers.can_serve(2)).arrays)
        del caches, feeds
        return mx.get_active_memory()

    run()  # what networks make once
    gc.collect()
    gc.disable()
    try:
        assert run() == run()
    finally:
        gc.enable()
