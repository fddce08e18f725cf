"""The products of modules with a recurrent state: computed for all sessions at once, and not again after a rewind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from specd.worker.engine.forward import BareCache, enable_batches, forward
from specd.worker.engine.jobs import Feed
from specd.worker.engine.lockstep import ask, in_lockstep
from specd.worker.layers.recurrent import MOST_TOKENS
from specd.worker.layers.session_layers import SessionLayers
from tests.worker.families import make_network

HYBRIDS = ["falcon_h1", "granitemoehybrid", "lfm2", "mamba2", "qwen3_5", "rwkv7"]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """The number of calls of each linear layer and convolution, by its identity."""
    calls: Counter[int] = Counter()

    def count(kind: type[nn.Module]) -> None:
        plain: Callable[..., Any] = kind.__call__

        def call(self: nn.Module, x: mx.array) -> mx.array:
            calls[id(self)] += 1
            result: mx.array = plain(self, x)
            return result

        monkeypatch.setattr(kind, "__call__", call)

    count(nn.Linear)
    count(nn.Conv1d)
    return calls


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_linear_layer_is_computed_once_for_all_sessions(name: str, counted: Counter[int]) -> None:
    network = make_network(name)
    assert enable_batches(network)
    caches = [BareCache(network, SessionLayers(network), True) for _ in range(3)]
    alone = [BareCache(network, SessionLayers(network), True) for _ in range(3)]
    tokens = [[1, 2, 3], [4], [5, 6]]
    together = forward([Feed(cache, mx.array(ids)) for cache, ids in zip(caches, tokens, strict=True)])
    one_by_one = [forward([Feed(cache, mx.array(ids))])[0] for cache, ids in zip(alone, tokens, strict=True)]
    for own, expected in zip(together, one_by_one, strict=True):
        np.testing.assert_allclose(own, expected, atol=1e-4)
    counted.clear()
    forward([Feed(cache, mx.array([7])) for cache in caches])
    linear = {id(part) for part in network.modules() if isinstance(part, nn.Linear)}
    assert {count for part, count in counted.items() if part in linear} == {1}


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_rewind_computes_no_product_again(name: str, counted: Counter[int]) -> None:
    network = make_network(name)
    enable_batches(network)
    layers = SessionLayers(network)
    cache = BareCache(network, layers, True)
    for ids in ([1, 2, 3], [4, 5, 6, 7]):
        mx.eval(forward([Feed(cache, mx.array(ids))]))
    counted.clear()
    assert layers.rewind(5) == 5
    assert layers.rewind(4) == 4  # into what the first one computed again
    assert not counted


def test_chunks_of_prompts_leave_no_products() -> None:
    """They would take more memory than the state."""
    network = make_network("falcon_h1")
    enable_batches(network)
    size = {}
    for length in (MOST_TOKENS, MOST_TOKENS + 1):
        layers = SessionLayers(network)
        mx.eval(forward([Feed(BareCache(network, layers, True), mx.array([1] * length))]))
        size[length] = layers.nbytes
    assert size[MOST_TOKENS + 1] < size[MOST_TOKENS]


def test_calls_in_lockstep_that_part_and_fail() -> None:
    """Each call gets its own rows, with any layers in the others; an error goes to the caller."""
    layers = [nn.Linear(4, 4) for _ in range(2)]
    seen: Counter[int] = Counter()

    def plain(module: nn.Linear, rows: mx.array) -> mx.array:
        seen[id(module)] += 1
        return nn.Linear.__call__(module, rows)

    def call(which: list[int], rows: mx.array) -> mx.array:
        for i in which:
            rows = ask(layers[i], plain, rows)
        return rows

    rows = [mx.random.normal((1, n, 4)) for n in (1, 3, 2)]
    ways = [[0, 1], [0], [1, 1]]
    results = in_lockstep([partial(call, way, own) for way, own in zip(ways, rows, strict=True)])
    expected = [layers[1](layers[0](rows[0])), layers[0](rows[1]), layers[1](layers[1](rows[2]))]
    for result, own in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, own, atol=1e-6)
    assert seen == {id(layers[0]): 1, id(layers[1]): 2}

    def fail() -> mx.array:
        raise ValueError("of this session")

    with pytest.raises(ValueError, match="of this session"):
        in_lockstep([lambda: call([0], rows[0]), fail])
