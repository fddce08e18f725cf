"""What stands in for MLX's own operations on the CPU gives what they give."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx import nn
from mlx.nn.layers.base import Module
from mlx_lm.models import activations, llama
from mlx_lm.models.cache import make_prompt_cache

from specd.settings import EMBEDDED_DRAFT
from specd.worker import constant, cpu_math, packed_linear
from specd.worker.batch import BareCache, Feed, enable_batches, forward
from specd.worker.constant import Constant
from specd.worker.cpu_math import Norm, RotaryEmbedding, attention, speed_up, swiglu
from specd.worker.eager_layer import start_layers_early
from specd.worker.model import load
from specd.worker.network import modules_of
from specd.worker.packed_linear import pack
from specd.worker.streams import STREAMS
from tests.models import FAMILIES, TINY_VOCABULARY_SIZE, small_network

finite = st.floats(-1e4, 1e4, width=32)


@given(
    groups=st.integers(1, 3),
    heads_of_group=st.integers(1, 3),
    n=st.one_of(st.integers(1, 9), st.sampled_from([49, 60])),  # many are shared out
    cached=st.integers(0, 40),
    is_causal=st.booleans(),
    is_spread=st.booleans(),
    shares_few=st.booleans(),
    sharpness=st.sampled_from([0.1, 1.0, 30.0]),
    seed=st.integers(0, 2**32),
)
def test_attention(
    groups: int,
    heads_of_group: int,
    n: int,
    cached: int,
    is_causal: bool,
    is_spread: bool,
    shares_few: bool,
    sharpness: float,
    seed: int,
) -> None:
    keys = mx.random.split(mx.random.key(seed), 3)
    heads, length, size = groups * heads_of_group, cached + n, 8
    # As models give them: [batch, n, heads, size], transposed.
    q = sharpness * mx.random.normal((1, n, heads, size), key=keys[0]).swapaxes(1, 2)
    k, v = (mx.random.normal((1, groups, length, size), key=key) for key in keys[1:])
    mask = "causal" if is_causal else None
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=size**-0.5, mask=mask)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cpu_math, "keeps_to_one_thread", lambda: is_spread)
        monkeypatch.setattr(cpu_math, "_WEIGHTS_FOR_ALL_STREAMS", 0)
        monkeypatch.setattr(STREAMS, "are_free", shares_few)
        actual = attention(q, k, v, size**-0.5, is_causal=is_causal)
    # A rounded logit is a factor of its exponential: of sharp ones both are 1.6e-5 off what float64 gives.
    np.testing.assert_allclose(np.array(actual), np.array(expected), atol=5e-5 if sharpness > 1 else 2e-5)


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=20))
def test_swiglu(pairs: list[tuple[float, float]]) -> None:
    gate, x = (mx.array(values) for values in zip(*pairs, strict=True))
    expected = nn.silu(gate) * x
    np.testing.assert_allclose(np.array(swiglu(gate, x)), np.array(expected), rtol=2e-5, atol=1e-5)


def test_what_is_not_finite_stays_so() -> None:
    """What finds a poisoned model looks at its logits."""
    assert np.isnan(np.array(swiglu(mx.array([np.nan, 1.0]), mx.array([1.0, np.nan])))).all()
    q = mx.array([[[[np.nan]], [[1.0]]]])
    k = v = mx.array([[[[1.0]], [[1.0]]]])
    assert np.isnan(np.array(attention(q, k, v, 1.0, is_causal=False))[0, 0]).all()


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    size=st.integers(1, 80),
    eps=st.sampled_from([1e-6, 1e-5, 0.1]),
    magnitude=st.sampled_from([1e-4, 1.0, 1e4]),
    seed=st.integers(0, 2**32),
)
def test_norm(shape: list[int], size: int, eps: float, magnitude: float, seed: int) -> None:
    keys = mx.random.split(mx.random.key(seed), 2)
    plain = nn.RMSNorm(size, eps)
    plain.weight = mx.random.normal((size,), key=keys[0])
    x = magnitude * mx.random.normal((*shape, size), key=keys[1])
    norm = Norm(plain)
    for _ in range(2):  # the second time with what the first has left
        np.testing.assert_allclose(np.array(norm(x)), np.array(plain(x)), rtol=2e-6)
    assert list(norm.parameters()) == ["weight"]


def test_a_constant_of_many_shapes_is_itself_and_does_not_grow() -> None:
    pair = Constant(mx.array([1.0, 2.0]))
    for n in range(1, 3 * constant._MOST_SHAPES):
        np.testing.assert_array_equal(np.array(pair.of((n, 2))), np.tile([1.0, 2.0], (n, 1)))
        assert pair.of((n, 2)) is pair.of((n, 2))
        assert len(pair._of_shape) <= constant._MOST_SHAPES


@pytest.mark.parametrize("offset", [0, 7, 131_000, mx.array([3, 0, 4000])])
@pytest.mark.parametrize("n", [1, 5, 40])
@pytest.mark.parametrize(("dims", "scale"), [(16, 1.0), (8, 1.0), (16, 0.25)])
def test_rotary_embedding(offset: int | mx.array, n: int, dims: int, scale: float) -> None:
    plain = nn.RoPE(dims, base=10_000.0, scale=scale)
    x = mx.random.normal((3, n, 2, 16), key=mx.random.key(0)).swapaxes(1, 2)
    for _ in range(2):  # the second from what the first has left
        actual = RotaryEmbedding(plain)(x, offset)
        np.testing.assert_allclose(np.array(actual), np.array(plain(x, offset)), atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_models_say_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone and in a batch, whatever of it a model of mlx-lm has."""
    network = small_network(name)
    _restore_later(network, monkeypatch)
    enable_batches(network)
    expected = _decode(network, batches=False)
    monkeypatch.setattr(cpu_math, "_is_exp_slow", lambda: True)
    monkeypatch.setattr(packed_linear, "has_small_products", lambda: True)
    monkeypatch.setattr(packed_linear, "keep_to_one_thread", lambda: None)
    assert speed_up(network)
    assert pack(network, TINY_VOCABULARY_SIZE)
    start_layers_early(network)
    assert not any(type(part) is nn.RoPE for part in network.modules())
    batches = enable_batches(network)
    for actual in (_decode(network, batches=False), _decode(network, batches=batches)):
        for own, other in zip(actual, expected, strict=True):
            np.testing.assert_allclose(own, other, atol=1e-4)


def test_nothing_is_replaced_where_exp_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    network = small_network("llama")
    monkeypatch.setattr(cpu_math, "_is_exp_slow", lambda: False)
    assert not speed_up(network)
    assert type(network.layers[0].self_attn.rope) is nn.RoPE


def test_models_for_comparison_are_as_mlx_lm_has_them() -> None:
    network = load(EMBEDDED_DRAFT, blas="").network
    assert type(network.layers[0].self_attn.rope) is nn.RoPE
    assert llama.swiglu is activations.swiglu


def _restore_later(network: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in modules_of(network):
        for name in ("swiglu", "scaled_dot_product_attention"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(module, name))


def _decode(network: Any, *, batches: bool) -> list[np.ndarray[Any, Any]]:
    """Feed two sessions twice, and return all logits of the second time."""
    caches = [BareCache(network, make_prompt_cache(network), batches) for _ in range(2)]
    for tokens in ([[1, 2, 3, 4, 5], [6]], [[7, 8, 9], [TINY_VOCABULARY_SIZE - 1]]):
        outputs = forward([Feed(cache, mx.array(ids)) for cache, ids in zip(caches, tokens, strict=True)])
    return [np.array(logits) for logits in outputs]
