"""Every family of mlx-lm with a tiny configuration: in rounds, alone and together, the tokens are mlx-lm's."""

from __future__ import annotations

import gc
import random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from specd.worker.cache.layers.session_layers import SessionLayers
from specd.worker.engine.forward import BareCache, Feed, enable_batches, forward, rewinds_exactly
from tests.worker.families import make_network
from tests.worker.family_configs import NETWORKS
from tests.worker.family_kinds import WINDOW
from tests.worker.models import TINY_VOCABULARY_SIZE

MAX_TOKENS = 40
PROMPT_LENGTHS = (5, WINDOW - 1, 60, 300)


def one_by_one(network: Any, prompt: list[int]) -> list[int]:
    """Decode greedily with mlx-lm's own caches."""
    cache = make_prompt_cache(network)
    tokens = [*prompt]
    logits = network(mx.array([prompt]), cache=cache)
    while len(tokens) < len(prompt) + MAX_TOKENS:
        latest: Any = mx.argmax(logits[0, -1]).item()
        tokens.append(latest)
        logits = network(mx.array([tokens[-1:]]), cache=cache)
    return tokens[len(prompt) :]


class Session:
    """A session that is decoded in rounds, with a draft that guesses most tokens."""

    def __init__(self, network: Any, batches: bool, prompt: list[int], expected: list[int], seed: int) -> None:
        self.cache = BareCache(network, SessionLayers(network), batches)
        self.tokens: list[int] = []
        self._prompt, self._expected, self._random = prompt, expected, random.Random(seed)
        self._pending = prompt
        self._proposal: list[int] = []

    @property
    def is_done(self) -> bool:
        return len(self.tokens) >= MAX_TOKENS

    def next_feed(self) -> Feed:
        count = self._random.choice((0, 1, 4, 8)) if self.tokens else 0
        right = self._expected[len(self.tokens) : len(self.tokens) + count]
        self._proposal = [
            token if self._random.random() < 0.8 else self._random.randrange(TINY_VOCABULARY_SIZE) for token in right
        ]
        return Feed(self.cache, mx.array([*self._pending, *self._proposal]))

    def take(self, logits: mx.array) -> None:
        choices: Any = mx.argmax(logits[-1 - len(self._proposal) :], axis=-1).tolist()
        accepted = next((i for i, token in enumerate(self._proposal) if token != choices[i]), len(self._proposal))
        self.tokens += choices[: accepted + 1]
        held = [*self._prompt, *self.tokens][:-1]
        reached = self.cache.layers.rewind(len(held))
        self._pending = [*held[reached:], self.tokens[-1]]


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_rounds_give_the_tokens_of_mlx_lm(name: str) -> None:
    network = make_network(name)
    assert rewinds_exactly(network)
    rng = random.Random(0)
    prompts = [[rng.randrange(TINY_VOCABULARY_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS]
    expected = [one_by_one(network, prompt) for prompt in prompts]
    batches = enable_batches(network)
    for at_once in (1, len(prompts)):
        sessions = [
            Session(network, batches, *pair, seed=i) for i, pair in enumerate(zip(prompts, expected, strict=True))
        ]
        for first in range(0, len(sessions), at_once):
            running = sessions[first : first + at_once]
            while running := [session for session in running if not session.is_done]:
                outputs = forward([session.next_feed() for session in running])
                for session, logits in zip(running, outputs, strict=True):
                    session.take(logits)
        assert [session.tokens[:MAX_TOKENS] for session in sessions] == expected


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
