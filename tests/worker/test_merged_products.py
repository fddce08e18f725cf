"""Merged products are those of the layers one by one, in any order of calls and with any inputs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.tuner.lora import LoRALinear

from specd.worker.engine.forward import agree, bare_cache, enable_batches, forward
from specd.worker.engine.jobs import Feed
from specd.worker.engine.merged_products import merge_products, merge_where_faster
from specd.worker.engine.static_step import StaticStep
from tests.worker.families import make_fresh
from tests.worker.models import TINY_VOCABULARY_SIZE
from tests.worker.whole_buffers import whole_buffers

FAMILIES = ["llama", "qwen3", "gpt_oss", "gemma2", "qwen2", "qwen3_next", "deepseek_v3"]


class Two(nn.Module):
    """Two layers, which a caller can call with one input or with two."""

    def __init__(self, second_inputs: int = 64, *, bias: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(64, 32, bias=bias)
        self.second = nn.Linear(second_inputs, 64, bias=bias)
        if bias:
            self.first.bias, self.second.bias = mx.random.normal((32,)), mx.random.normal((64,))

    def __call__(self, x: mx.array, y: mx.array) -> list[mx.array]:
        return [self.first(x), self.second(y)]


def test_layers_with_one_input_give_the_same_in_one_product() -> None:
    x = mx.random.normal((1, 3, 64))
    for bits, bias in ((0, False), (0, True), (4, False), (8, True)):
        network = Two(bias=bias)
        if bits:
            nn.quantize(network, bits=bits, group_size=32)
        expected = network(x, x)
        assert _merge(network, x, x) == 1
        _assert_same(network(x, x), expected)
        assert isinstance(network.first, nn.QuantizedLinear if bits else nn.Linear)


@pytest.mark.parametrize("seed", range(20))
def test_each_call_gets_the_product_of_its_own_input(seed: int) -> None:
    """After they were merged, a network may call layers in any order, also one of them alone or twice."""
    choose = random.Random(seed)
    network, inputs = Two(), [mx.random.normal((1, 2, 64), key=mx.random.key(i)) for i in range(3)]
    weights = {name: np.array(network[name].weight) for name in ("first", "second")}
    _merge(network, inputs[0], inputs[0])
    for _ in range(12):
        name, x = choose.choice([*weights]), choose.choice(inputs)
        _assert_same([network[name](x)], [mx.array(np.array(x) @ weights[name].T)])


def test_a_low_rank_layer_stands_before_a_part() -> None:
    network, x = Two(), mx.random.normal((1, 3, 64))
    adapter: Any = LoRALinear.from_base(network.first)
    adapter.lora_b = mx.random.normal(adapter.lora_b.shape)
    expected = [adapter(x), network.second(x)]
    _merge(network, x, x)
    adapter.linear, network.first = network.first, adapter
    _assert_same(network(x, x), expected)


@pytest.mark.parametrize(
    "second", [nn.Linear(64, 32), nn.Linear(32, 32, bias=False), nn.QuantizedLinear(64, 32, bias=False)]
)
def test_layers_of_different_forms_stay_apart(second: nn.Module) -> None:
    network: Any = Two()
    x = mx.random.normal((1, 64))
    network.second = second
    y = x if second.weight.shape[-1] != 32 else x[:, :32]
    assert _merge(network, x, y) == 0


def test_layers_with_different_inputs_stay_apart() -> None:
    x = mx.random.normal((1, 64))
    assert _merge(Two(), x, x + 0) == 0


def test_parts_keep_their_weights_and_the_memory_stays_the_same() -> None:
    network, x = Two(), mx.random.normal((1, 64))
    mx.eval(network.parameters(), x)
    mx.clear_cache()
    before, weight = mx.get_active_memory(), np.array(network.second.weight)
    products = merge_products(network, lambda: network(x, x))
    assert abs(mx.get_active_memory() + mx.get_cache_memory() - before) < weight.nbytes // 4
    np.testing.assert_array_equal(np.array(network.second.weight), weight)
    products[0].take_apart()
    assert type(network.second) is nn.Linear


def test_nothing_is_kept_of_an_input_that_all_parts_have_read() -> None:
    network, x = Two(), mx.random.normal((4096, 64))
    _merge(network, x, x)
    mx.eval(x)
    mx.eval(network(x, x))
    before = mx.get_active_memory()
    del x
    assert mx.get_active_memory() <= before - 4096 * 64 * 4


@pytest.mark.parametrize("name", FAMILIES)
def test_families_compute_the_same(name: str) -> None:
    """Sessions are fed, rewound and batched, compared with whole passes of mlx-lm's own network."""
    network, plain = (make_fresh(name) for _ in range(2))  # both have the same weights
    batches = enable_batches(network)
    assert _merge(network, mx.array([[0]]), bare_cache(network).layers.caches)
    choose = random.Random(name)
    caches = [bare_cache(network, batches=batches) for _ in range(3)]
    texts: list[list[int]] = [[] for _ in caches]
    for _ in range(8):
        feeds, spans = [], []
        for cache, text in zip(caches, texts, strict=True):
            if len(text) > 2:
                del text[cache.layers.rewind(len(text) - choose.randrange(3)) :]
            spans.append(len(text))
            text += [choose.randrange(TINY_VOCABULARY_SIZE) for _ in range(choose.randint(1, 6))]
            feeds.append(Feed(cache, mx.array(text[spans[-1] :])))
        for logits, text, begin in zip(forward(feeds), texts, spans, strict=True):
            assert agree(logits, plain(mx.array([text]))[0, begin:])


@pytest.mark.parametrize("bits", [0, 4])
def test_a_compiled_pass_has_merged_products(bits: int) -> None:
    network, plain = (make_fresh("qwen3") for _ in range(2))
    if bits:
        for own in (network, plain):
            nn.quantize(own, bits=bits, group_size=32)
    assert _merge(network, mx.array([[0]])) == 2 * len(network.layers)
    with whole_buffers(network, compiles=True):
        static, text = StaticStep(network, 64), [1, 2, 3]
        cache = bare_cache(network, static=static)
        forward([Feed(cache, mx.array(text))])
        for ids in ([4], [5, 6, 7], [8], [9, 10, 11]):
            text += ids
            assert agree(forward([Feed(cache, mx.array(ids))])[0], plain(mx.array([text]))[0, -len(ids) :])


@pytest.mark.parametrize(
    ("seconds", "is_right", "is_kept"),
    [
        ([2.0, 1.0, 2.1, 1.1], True, True),
        ([2.0, 1.0, 2.1, 1.1], False, False),
        ([1.0, 2.0, 1.1, 2.1], True, False),
        ([1.0], True, False),  # the first merged pass fails
    ],
)
def test_merged_products_are_kept_if_they_are_right_and_faster(
    seconds: list[float], is_right: bool, is_kept: bool
) -> None:
    network, x = Two(), mx.random.normal((1, 3, 64))
    expected = network(x, x)
    outputs = iter([expected, expected, expected if is_right else [1.1 * each for each in expected]])
    times, were_merged = iter(seconds), []

    def logits() -> mx.array:
        network(x, x)
        return mx.concatenate(next(outputs), axis=-1)

    def measured() -> float:
        were_merged.append(type(network.first) is not nn.Linear)
        return next(times)

    merge_where_faster(network, logits, measured)
    assert were_merged == [False, True] * (len(were_merged) // 2)
    assert (type(network.first) is not nn.Linear) is is_kept
    _assert_same(network(x, x), expected)


def _merge(network: Any, *inputs: Any) -> int:
    return len(merge_products(network, lambda: network(*inputs)))


def _assert_same(outputs: Sequence[mx.array], expected: Sequence[mx.array]) -> None:
    for own, plain in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(np.array(own), np.array(plain), atol=1e-4)
