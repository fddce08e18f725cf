"""Packed weights give what the usual ones give, and each row the same bits in any company."""

from __future__ import annotations

from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx import nn
from mlx_lm.models import llama

from specd.settings import EMBEDDED_DRAFT, EMBEDDED_HEAD, EMBEDDED_TARGET
from specd.worker.cpu import openblas as blas
from specd.worker.cpu.early_layers import start_layers_early
from specd.worker.cpu.packed_linear import PackedEmbedding, PackedLinear, pack
from specd.worker.cpu.streams import STREAMS
from specd.worker.cpu.undo import UnsuitableError
from specd.worker.layers.session_layers import SessionLayers
from specd.worker.model.loader import load
from tests.worker.models import small_network

on_its_core = pytest.mark.skipif(not blas.has_small_products(), reason="this OpenBLAS packs small products too")


def linear(num_outputs: int, num_inputs: int, *, bias: bool = False, seed: int = 0) -> nn.Linear:
    layer = nn.Linear(num_inputs, num_outputs, bias=bias)
    layer.weight = mx.random.normal((num_outputs, num_inputs), key=mx.random.key(seed))
    if bias:
        layer.bias = mx.random.normal((num_outputs,), key=mx.random.key(seed + 1))
    return layer


@given(
    leading=st.lists(st.integers(1, 9), min_size=0, max_size=3),
    num_inputs=st.sampled_from([1, 7, 64, 300]),
    num_outputs=st.integers(1, 200),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_packed_layer_is_the_layer(
    leading: list[int], num_inputs: int, num_outputs: int, bias: bool, seed: int
) -> None:
    """With few rows and with many, also on several streams, and where the last panel is not full."""
    layer = linear(num_outputs, num_inputs, bias=bias, seed=seed)
    x = mx.random.normal((*leading, num_inputs), key=mx.random.key(seed + 2))
    packed = PackedLinear(layer.weight, layer.get("bias"))
    np.testing.assert_allclose(np.array(packed(x)), np.array(layer(x)), atol=1e-5 * num_inputs)


@pytest.mark.parametrize("num_inputs", [3906, 3907, 7813, 15_625])
def test_many_inputs_have_narrower_panels(num_inputs: int) -> None:
    layer = linear(70, num_inputs)
    packed = PackedLinear(layer.weight)
    panels, _, width = packed.weight.shape
    assert 4 * num_inputs * width <= 100**3
    assert panels == -(-70 // width)
    x = mx.random.normal((5, num_inputs), key=mx.random.key(1))
    np.testing.assert_allclose(np.array(packed(x)), np.array(layer(x)), atol=1e-5 * num_inputs)


@on_its_core
@pytest.mark.parametrize("num_outputs", [192, 64 * 101])
def test_a_row_has_the_same_bits_whatever_the_others_are(num_outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a token's products are the same in a decode, in a verify of any width, and beside other sessions.

    Also with enough outputs to share them out.
    """
    monkeypatch.setattr(STREAMS, "all", (3 * STREAMS.all)[:3])
    packed = PackedLinear(linear(num_outputs, 576).weight)
    assert (packed._shared is packed._whole) == (num_outputs == 192)
    x = mx.random.normal((100, 576), key=mx.random.key(1))
    together = np.array(packed(x))
    for size in (1, 2, 3, 4, 5, 7, 8, 47, 60):
        for begin, owns_all_cores in product((0, 40), (False, True)):
            monkeypatch.setattr(STREAMS, "owns_all_cores", owns_all_cores)
            part = packed(x[begin : begin + size])
            np.testing.assert_array_equal(np.array(part), together[begin : begin + size])


@pytest.mark.parametrize("shape", [(3,), (2, 4)])
def test_a_packed_embedding_is_the_embedding(shape: tuple[int, ...]) -> None:
    layer = nn.Embedding(100, 24)
    packed = PackedEmbedding(layer.weight)
    token_ids = mx.random.randint(0, 100, shape, key=mx.random.key(0))
    np.testing.assert_array_equal(np.array(packed(token_ids)), np.array(layer(token_ids)))
    x = mx.random.normal((2, 3, 24), key=mx.random.key(1))
    np.testing.assert_allclose(np.array(packed.as_linear(x)), np.array(layer.as_linear(x)), atol=1e-4)


def test_what_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "has_small_products", lambda: True)
    monkeypatch.setattr(blas, "keeps_to_one_thread", lambda: False)
    kept_to_one_thread: list[bool] = []
    monkeypatch.setattr(blas, "keep_to_one_thread", lambda: kept_to_one_thread.append(True))
    tied = small_network("llama", vocab_size=40)
    untied = small_network("llama", vocab_size=40, tie_word_embeddings=False)
    untied.layers[0].mlp.down_proj = wide = linear(32, 20_000)  # with more inputs than a panel can have
    untied.layers[0].mlp.up_proj = untied.layers[0].mlp.gate_proj = linear(20_000, 32)
    for network in (tied, untied):
        assert [*pack(network, 40)]
        assert kept_to_one_thread == [True], "BLAS shares out what is not packed"
        assert not any(type(part) is nn.Linear for part in network.modules() if part is not wide)
    assert type(tied.model.embed_tokens) is PackedEmbedding
    assert type(untied.model.embed_tokens) is nn.Embedding
    assert type(untied.lm_head) is PackedLinear
    assert untied.layers[0].mlp.down_proj is wide


def test_nothing_is_packed_where_it_would_be_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    network = small_network("llama")
    monkeypatch.setattr(blas, "has_small_products", lambda: False)
    with pytest.raises(UnsuitableError):
        [*pack(network, 40)]
    monkeypatch.setattr(blas, "has_small_products", lambda: True)
    monkeypatch.setattr(STREAMS, "all", 5 * STREAMS.all)
    with pytest.raises(UnsuitableError):
        [*pack(network, 40)]
    assert type(network.layers[0].mlp.down_proj) is nn.Linear


@pytest.mark.parametrize("is_optimized", [False, True])
def test_only_a_worker_has_packed_weights_and_early_layers(is_optimized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models for comparison are as mlx-lm has them."""
    for name in ("swiglu", "scaled_dot_product_attention"):  # which other tests want as they are
        monkeypatch.setattr(llama, name, getattr(llama, name))
    monkeypatch.setattr(blas, "keep_to_one_thread", lambda: None)
    network = load(EMBEDDED_DRAFT, blas="", is_optimized=is_optimized).network
    is_packed = is_optimized and blas.has_small_products()
    assert any(type(part) is PackedLinear for part in network.modules()) == is_packed
    assert all((type(layer) is not llama.TransformerBlock) == is_optimized for layer in network.layers)


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_head_is_packed_like_its_target(is_packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not beside a target that BLAS computes with all its threads."""
    for name in ("swiglu", "scaled_dot_product_attention"):  # which other tests want as they are
        monkeypatch.setattr(llama, name, getattr(llama, name))
    monkeypatch.setattr(blas, "keep_to_one_thread", lambda: None)
    monkeypatch.setattr(blas, "keeps_to_one_thread", lambda: is_packed)
    token_ids, hidden = mx.array([[1, 2, 3]]), mx.random.normal((1, 3, 256), key=mx.random.key(0))
    outputs = []
    for is_optimized in (False, True):
        head: Any = load(EMBEDDED_TARGET, blas="", is_optimized=is_optimized, head=EMBEDDED_HEAD).head
        network = head.network
        assert head.batches
        expected = is_optimized and is_packed and blas.has_small_products()
        assert any(type(part) is PackedLinear for part in network.modules()) == expected
        outputs.append(np.array(network.logits(network(token_ids, hidden, SessionLayers(network).caches))))
    np.testing.assert_allclose(outputs[1], outputs[0], atol=1e-3)


def test_an_early_layer_is_of_the_class_of_the_layer() -> None:
    network = small_network("llama")
    layer: Any = network.layers[1]
    x = mx.random.normal((1, 3, 32), key=mx.random.key(0))
    expected = np.array(layer(x))
    undo = [*start_layers_early(network)]
    assert type(layer) is not llama.TransformerBlock
    assert isinstance(layer, llama.TransformerBlock)
    np.testing.assert_array_equal(np.array(layer(x)), expected)
    for put_back in undo:
        put_back()
    assert type(layer) is llama.TransformerBlock
