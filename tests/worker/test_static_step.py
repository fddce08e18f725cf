"""Passes of fixed shapes, compiled and shared by sessions, give what mlx-lm's own form gives, in few shapes."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache

from specd.worker.engine import shared_rows
from specd.worker.engine.forms import choose_forms
from specd.worker.engine.forward import BareCache, bare_cache, enable_batches, forward
from specd.worker.engine.jobs import Feed
from specd.worker.engine.shared_rows import Sharing
from specd.worker.engine.static_step import MOST_TOKENS, StaticStep
from specd.worker.layers.session_layers import SessionLayers
from tests.worker.families import make_network
from tests.worker.family_kinds import CHUNKS, KINDS
from tests.worker.models import TINY_VOCABULARY_SIZE
from tests.worker.whole_buffers import STATIC, whole_buffers

SHORTEST = MOST_TOKENS + 16
SHARING = ["qwen3", "deepseek_v3"]


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make buffers move, sessions change their buffer and be idle after a few tokens."""
    monkeypatch.setattr(KVCache, "step", 4)
    monkeypatch.setattr(shared_rows, "_SHORTEST", SHORTEST)
    monkeypatch.setattr(shared_rows, "_IDLE_PASSES", 3)


@pytest.mark.parametrize("name", SHARING)
@settings(max_examples=15)
@given(st.integers(0, 2**31))
def test_sessions_that_share_rows_compute_as_each_alone(name: str, seed: int) -> None:
    """Sessions come, go, rewind, are copied, pause and change to longer buffers, in any order."""
    draw = random.Random(seed)
    with whole_buffers(make_network(name)) as network:
        batches = enable_batches(network)
        static = StaticStep(network, 10**6, 1)
        sharing = Sharing(static, 10**9)
        held: list[tuple[SessionLayers, list[int]]] = [(SessionLayers(network), []) for _ in range(5)]
        for _ in range(20):
            feeds, fed = [], []
            for i in draw.sample(range(5), draw.choice([1, 2, 3, 5])):
                layers, tokens = held[i]
                if draw.random() < 0.3:
                    del tokens[layers.rewind(draw.randint(max(0, len(tokens) - 6), len(tokens))) :]
                event = draw.random()
                if event < 0.05:
                    layers, tokens = SessionLayers(network), []
                elif event < 0.1 and tokens:
                    layers, tokens = layers.copy(len(tokens)), [*tokens]
                held[i] = layers, tokens
                width = draw.choice([1, 1, 2, 3, 5, 9, MOST_TOKENS + 6 if draw.random() < 0.2 else 4])
                ids = [draw.randrange(TINY_VOCABULARY_SIZE) for _ in range(width)]
                tokens += ids
                feeds.append(Feed(BareCache(network, layers, batches, static, sharing), mx.array(ids)))
                fed.append((tokens, width))
            for logits, (tokens, width) in zip(forward(feeds), fed, strict=True):
                expected = np.array(network(mx.array([tokens]))[0])[-width:]
                np.testing.assert_allclose(np.array(logits), expected, atol=2e-3 * float(np.abs(expected).max()))


def test_sessions_share_a_pass_until_one_is_left() -> None:
    with whole_buffers(make_network("qwen3")) as network:
        static = StaticStep(network, 10**6, 1)
        sharing = Sharing(static, 10**9)
        caches = [BareCache(network, SessionLayers(network), False, static, sharing) for _ in range(3)]

        def compute(*own: BareCache) -> list[bool]:
            mx.eval(forward([Feed(cache, mx.array([1, 2])) for cache in own]))
            return [cache.layers.shared is not None for cache in caches]

        assert compute(*caches) == [False, False, False]  # first tokens
        assert compute(*caches) == [True, True, True]
        assert compute(caches[0]) == [True, True, True]  # the others soon come back
        for _ in range(4):
            shared = compute(*caches[:2])
        assert shared == [True, True, False]  # the third was idle
        for _ in range(5):
            shared = compute(caches[0])
        assert shared == [False, False, False]


def test_no_buffer_is_left_without_sessions() -> None:
    with whole_buffers(make_network("qwen3")) as network:
        static = StaticStep(network, 10**6, 1)
        sharing = Sharing(static, 10**9)
        caches = [BareCache(network, SessionLayers(network), False, static, sharing) for _ in range(4)]
        before = mx.get_active_memory()
        for _ in range(2):
            mx.eval(forward([Feed(cache, mx.array([1, 2])) for cache in caches]))
        del caches
        assert mx.get_active_memory() > before
        sharing.release_unshared()
        assert mx.get_active_memory() <= before


def test_buffers_beyond_the_limit_are_not_shared() -> None:
    with whole_buffers(make_network("qwen3")) as network:
        static = StaticStep(network, 10**6, 100)
        sharing = Sharing(static, 2 * 2 * SHORTEST * 100 - 1)
        caches = [BareCache(network, SessionLayers(network), False, static, sharing) for _ in range(2)]
        for _ in range(2):
            mx.eval(forward([Feed(cache, mx.array([1, 2])) for cache in caches]))
        assert not any(cache.layers.shared for cache in caches)


@pytest.mark.parametrize("name", [name for name in KINDS if name not in CHUNKS])
def test_attention_sees_few_shapes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 rounds with random acceptance after two prompts of different lengths, and a draft's pass of two tokens."""
    shapes = set()
    attend = mx.fast.scaled_dot_product_attention

    def record(q: mx.array, k: mx.array, v: mx.array, *, mask: Any = None, **options: Any) -> mx.array:
        if q.shape[2] > 1:
            shapes.add((q.shape[2], k.shape[2], getattr(mask, "shape", mask) and tuple(mask.shape)[-2:]))
        return attend(q, k, v, mask=mask, **options)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", record)
    draw = random.Random(0)
    with whole_buffers(make_network(name)) as network:
        static = StaticStep(network, 10**6) if name in STATIC else None
        for prompt in (6, 8):
            cache = bare_cache(network, static=static)
            mx.eval(forward([Feed(cache, mx.zeros(prompt, mx.uint32))]))
            for _ in range(100):
                width = draw.choice([2, 4, 6])
                mx.eval(forward([Feed(cache, mx.zeros(width, mx.uint32))]))
                cache.layers.rewind(cache.layers.num_fed - draw.randrange(width))
    lengths = {length for _, length, _ in shapes}
    widths = {width for width, _, _ in shapes}
    assert widths <= ({2, 4, 8} if static is not None else {*range(2, 9)})
    assert len(lengths) <= 24  # up to about 350 tokens, in blocks of 4: 4 lengths in each octave
    assert len(shapes) <= len(widths) * len(lengths)


def test_a_compiled_pass_gives_what_mlx_lm_gives() -> None:
    with whole_buffers(make_network("qwen3"), compiles=True) as network:
        static, tokens = StaticStep(network, 64), [1, 2, 3]
        cache = bare_cache(network, static=static)
        mx.eval(forward([Feed(cache, mx.array(tokens))]))
        for ids in ([4], [5, 6, 7], [8], [9, 10, 11]):
            tokens += ids
            logits = np.array(forward([Feed(cache, mx.array(ids))])[0])
            np.testing.assert_allclose(logits, np.array(network(mx.array([tokens]))[0])[-len(ids) :], atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "gemma2", "qwen3_next", "llama4"])
def test_the_chosen_forms_compute_what_mlx_lm_computes(name: str) -> None:
    network = make_network(name)
    batches = enable_batches(network)
    try:
        mx.disable_compile()
        static, sharing = choose_forms(network, batches=batches, context_length=512, bytes_per_token=64)
        caches = [bare_cache(network, batches=batches, static=static, sharing=sharing) for _ in range(2)]
        tokens: list[list[int]] = [[], []]
        for new in ([[1, 2, 3], [4, 5]], [[6], [7, 8]], [[9, 10], [11]]):
            outputs = forward([Feed(cache, mx.array(ids)) for cache, ids in zip(caches, new, strict=True)])
            for logits, own, ids in zip(outputs, tokens, new, strict=True):
                own.extend(ids)
                expected = np.array(network(mx.array([own]))[0])[-len(ids) :]
                np.testing.assert_allclose(np.array(logits), expected, atol=2e-3 * float(np.abs(expected).max()))
    finally:
        mx.enable_compile()
        network.fixed_shapes = False
