"""The replacements of MLX's own operations on the CPU give the same results."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from mlx import nn
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models import activations, llama

from specd.settings import EMBEDDED_DRAFT
from specd.worker.cpu import constant, convolution, early_layers, norm, openblas, ops, packed_linear, packed_mlp, rotary
from specd.worker.cpu.ops import attention, swiglu
from specd.worker.cpu.optimize import optimize
from specd.worker.cpu.rotary import RotaryEmbedding
from specd.worker.cpu.streams import STREAMS
from specd.worker.engine.forward import BareCache, agree, enable_batches, forward, trial_logits
from specd.worker.engine.jobs import Feed
from specd.worker.layers.session_layers import SessionLayers
from specd.worker.model.loader import load
from tests.worker.models import FAMILIES, TINY_VOCABULARY_SIZE, small_network

finite = st.floats(-1e4, 1e4, width=32)


@given(
    groups=st.integers(1, 3),
    heads_of_group=st.integers(1, 3),
    n=st.one_of(st.integers(1, 9), st.sampled_from([49, 60])),  # many are shared out
    cached=st.integers(0, 40),
    is_causal=st.booleans(),
    is_spread=st.booleans(),
    shares_few=st.booleans(),
    largest_mask=st.sampled_from([0, 10**6]),
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
    largest_mask: int,
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
        monkeypatch.setattr(openblas, "keeps_to_one_thread", lambda: is_spread)
        monkeypatch.setattr(ops, "_WEIGHTS_FOR_ALL_STREAMS", 0)
        monkeypatch.setattr(ops, "_LARGEST_MASK", largest_mask)
        monkeypatch.setattr(STREAMS, "owns_all_cores", shares_few)
        actual = attention(q, k, v, size**-0.5, is_causal=is_causal)
    # A rounded logit is a factor of its exponential: of sharp ones both are 1.6e-5 off what float64 gives.
    np.testing.assert_allclose(np.array(actual), np.array(expected), atol=5e-5 if sharpness > 1 else 2e-5)


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=20))
def test_swiglu(pairs: list[tuple[float, float]]) -> None:
    gate, x = (mx.array(values) for values in zip(*pairs, strict=True))
    expected = nn.silu(gate) * x
    np.testing.assert_allclose(np.array(swiglu(gate, x)), np.array(expected), rtol=2e-5, atol=1e-5)


def test_what_is_not_finite_stays_so() -> None:
    """The check for a poisoned model reads its logits."""
    assert np.isnan(np.array(swiglu(mx.array([np.nan, 1.0]), mx.array([1.0, np.nan])))).all()
    q = mx.array([[[[np.nan]], [[1.0]]]])
    k = v = mx.array([[[[1.0]], [[1.0]]]])
    assert np.isnan(np.array(attention(q, k, v, 1.0, is_causal=False))[0, 0]).all()


def test_masks_that_are_kept_stay_small() -> None:
    """Each round has another length: masks of long sessions added up to gigabytes."""
    for length in range(4000, 4200):
        q, k = mx.zeros((1, 8, 8, 4)), mx.zeros((1, 2, length, 4))
        attention(q, k, k, 0.5, is_causal=True)
    ops._causal_mask.cache_clear()
    before = mx.get_active_memory()
    for length in range(2000, 4200, 20):
        for heads in (2, 8):
            q, k = mx.zeros((1, heads, 8, 4)), mx.zeros((1, 2, length, 4))
            mx.eval(attention(q, k, k, 0.5, is_causal=True))
    assert mx.get_active_memory() - before < 64 * 4 * ops._LARGEST_MASK


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
    replacement = norm.Norm(plain)
    for _ in range(2):  # the second time with what the first has left
        np.testing.assert_allclose(np.array(replacement(x)), np.array(plain(x)), rtol=2e-6)
    assert list(replacement.parameters()) == ["weight"]


def test_a_constant_of_many_shapes_is_itself_and_does_not_grow() -> None:
    pair = constant.Constant(mx.array([1.0, 2.0]))
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
        actual = RotaryEmbedding(plain.dims, plain.traditional, plain.base, plain.scale)(x, offset)
        np.testing.assert_allclose(np.array(actual), np.array(plain(x, cast(Any, offset))), atol=1e-5)


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every optimisation be tried, and put the functions of mlx-lm back."""
    monkeypatch.setattr(ops, "check_platform", lambda: None)
    for module in (norm, rotary):
        monkeypatch.setattr(module, "check_platform", lambda: None)
    monkeypatch.setattr(openblas, "has_small_products", lambda: True)
    monkeypatch.setattr(openblas, "keep_to_one_thread", lambda: None)
    monkeypatch.setattr(openblas, "use_all_threads", lambda: None)
    for name in (*FAMILIES, "ministral3", "seed_oss", "olmo_hybrid"):
        module = importlib.import_module(f"mlx_lm.models.{name}")
        for function in ("swiglu", "scaled_dot_product_attention"):
            if hasattr(module, function):
                monkeypatch.setattr(module, function, getattr(module, function))


@pytest.fixture
def optimized(anywhere: None) -> Callable[..., tuple[dict[str, int], dict[str, str]]]:
    def optimize_and_compare(
        network: Module, vocabulary_size: int = TINY_VOCABULARY_SIZE
    ) -> tuple[dict[str, int], dict[str, str]]:
        """Return what was replaced and what was not, and the reasons."""
        expected = trial_logits(network, batches=False)
        with structlog.testing.capture_logs() as log:
            optimize(network, vocabulary_size, lambda: agree(trial_logits(network, batches=False), expected))
        assert agree(trial_logits(network, batches=False), expected)
        return log[-1]["replaced"], log[-1]["not_replaced"]

    return optimize_and_compare


Optimized = Callable[..., tuple[dict[str, int], dict[str, str]]]
ALL = {"attention", "swiglu", "norms", "rotary embeddings", "packed weights", "packed MLPs", "early layers"}


@pytest.mark.parametrize("name", FAMILIES)
def test_models_say_the_same(name: str, optimized: Optimized) -> None:
    """Alone and in a batch, with all variants in models of mlx-lm."""
    network = small_network(name)
    enable_batches(network)
    expected = _decode(network, batches=False)
    replaced, _ = optimized(network)
    assert {"packed weights", "early layers"} <= {*replaced}
    assert replaced["early layers"] == len(network.layers)
    batches = enable_batches(network)
    for actual in (_decode(network, batches=False), _decode(network, batches=batches)):
        for own, other in zip(actual, expected, strict=True):
            np.testing.assert_allclose(own, other, atol=1e-4)


def test_a_network_that_multiplies_by_its_embedding(optimized: Optimized) -> None:
    """seed_oss with tied embeddings asks the embedding for its weight."""
    network = small_network("seed_oss", vocab_size=40)
    replaced, _ = optimized(network, 40)
    assert replaced["packed weights"] > 0
    embedding = network.model.embed_tokens
    assert type(embedding) is packed_linear.PackedEmbedding
    assert list(dict(tree_flatten(embedding.parameters()))) == ["embedding.weight"], "the packed weight goes"


@given(
    n=st.integers(1, 20),
    channels=st.integers(1, 9),
    width=st.integers(1, 8),
    padding=st.integers(0, 7),
    bias=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_short_convolution(n: int, channels: int, width: int, padding: int, bias: bool, seed: int) -> None:
    mx.random.seed(seed)
    plain = nn.Conv1d(channels, channels, width, groups=channels, padding=padding, bias=bias)
    if bias:
        plain.bias = mx.random.normal((channels,))
    parent = nn.Sequential(plain)
    parent.conv = plain
    assert len([*convolution.replace_convolutions(parent)]) == 1
    x = mx.random.normal((2, n + width - 1, channels))
    np.testing.assert_allclose(parent.conv(x), plain(x), atol=1e-5)


def test_other_convolutions_stay() -> None:
    parent = nn.Module()
    parent.across = nn.Conv1d(4, 4, 3)
    parent.in_groups = nn.Conv1d(4, 4, 3, groups=2)
    parent.with_stride = nn.Conv1d(4, 4, 3, groups=4, stride=2)
    parent.dilated = nn.Conv1d(4, 4, 3, groups=4, dilation=2)
    parent.long = nn.Conv1d(4, 4, 9, groups=4)
    assert not [*convolution.replace_convolutions(parent)]


class Asking(llama.Model):
    """A network that wants to know of which class its layers are, as olmo_hybrid does."""

    def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        logits: mx.array = super().__call__(inputs, cache)
        return logits if all(isinstance(layer, llama.TransformerBlock) for layer in self.layers) else -logits


def test_a_network_that_asks_for_the_class_of_a_layer(optimized: Optimized) -> None:
    network = small_network("llama")
    network.__class__ = Asking
    replaced, _ = optimized(network)
    assert replaced["early layers"] == 2


class Doubled(nn.Module):
    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.plain = plain

    def __call__(self, *args: Any, **options: Any) -> Any:
        return 2 * self.plain(*args, **options)


FAULTY = {
    "pack": "packed weights",
    "pack_mlps": "packed MLPs",
    "start_layers_early": "early layers",
    "replace_norms": "norms",
    "replace_rotary": "rotary embeddings",
    "replace_attention": "attention",
}


@pytest.mark.parametrize("faulty", FAULTY)
@pytest.mark.parametrize("raises", [False, True])
def test_what_is_not_the_same_is_put_back(
    faulty: str, raises: bool, optimized: Optimized, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory, layer by layer, and only what is to blame."""
    network = small_network("llama")
    weights = {name: np.array(weight) for name, weight in cast(Any, tree_flatten(network.parameters()))}

    def double_the_mlp(*_: Any) -> Iterator[Any]:
        layer = network.layers[1]
        plain, layer.mlp = layer.mlp, Doubled(layer.mlp)
        yield lambda: setattr(layer, "mlp", plain)
        if raises:
            raise KeyError("changed in the next mlx-lm")

    for module in (early_layers, norm, ops, packed_linear, packed_mlp, rotary):
        monkeypatch.setattr(module, faulty, double_the_mlp, raising=False)
    replaced, not_replaced = optimized(network)
    name = FAULTY[faulty]
    assert not_replaced[name] == ("KeyError('changed in the next mlx-lm')" if raises else "other logits")
    # Nothing is packed in MLPs whose layers are not.
    assert {*replaced} == ALL - {name} - ({"packed MLPs"} if faulty == "pack" else set())
    if faulty == "pack":
        for path, weight in cast(Any, tree_flatten(network.parameters())):
            np.testing.assert_array_equal(np.array(weight), weights[path])


def test_packed_weights_are_put_back_as_they_were(anywhere: None) -> None:
    network = small_network("llama", vocab_size=40)
    before = {name: np.array(weight) for name, weight in cast(Any, tree_flatten(network.parameters()))}
    undo = [*packed_linear.pack(network, 40), *packed_mlp.pack_mlps(network), *early_layers.start_layers_early(network)]
    assert type(network.model.embed_tokens) is packed_linear.PackedEmbedding
    for put_back in reversed(undo):
        put_back()
    after = {name: np.array(weight) for name, weight in cast(Any, tree_flatten(network.parameters()))}
    assert after.keys() == before.keys()
    for name, weight in before.items():
        np.testing.assert_array_equal(after[name], weight)
    assert {type(part) for part in network.modules()} <= {
        type(part) for part in small_network("llama", vocab_size=40).modules()
    }


def test_the_reasons_are_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    network = small_network("llama")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.setattr(openblas, "has_small_products", lambda: False)
    with structlog.testing.capture_logs() as log:
        optimize(network, TINY_VOCABULARY_SIZE, lambda: True)
    assert type(network.layers[0].self_attn.rope) is nn.RoPE
    assert {*log[-1]["replaced"]} == {"early layers"}
    assert log[-1]["not_replaced"]["attention"] == "this is faster with MLX on x86 Linux only"
    assert "kernel for small products" in log[-1]["not_replaced"]["packed weights"]
    assert log[-1]["not_replaced"]["packed MLPs"] == "nothing found"


def test_workers_do_not_need_a_module_of_mlx_lm_that_is_only_optimised() -> None:
    code = "import sys; sys.modules['mlx_lm.models.activations'] = None; import specd.worker.main"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_models_for_comparison_are_as_mlx_lm_has_them() -> None:
    network = load(EMBEDDED_DRAFT, blas="").network
    assert type(network.layers[0].self_attn.rope) is nn.RoPE
    assert llama.swiglu is activations.swiglu


def _decode(network: Any, *, batches: bool) -> list[np.ndarray[Any, Any]]:
    """Feed two sessions twice, and return all logits of the second time."""
    caches = [BareCache(network, SessionLayers(network), batches) for _ in range(2)]
    for tokens in ([[1, 2, 3, 4, 5], [6]], [[7, 8, 9], [TINY_VOCABULARY_SIZE - 1]]):
        outputs = forward([Feed(cache, mx.array(ids)) for cache, ids in zip(caches, tokens, strict=True)])
    return [np.array(logits) for logits in outputs]
