"""The contract of layer caches: after any feeds, rewinds and copies, a network computes what it does without them."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_map

from specd.worker.cache.layers import window as window_module
from specd.worker.cache.layers.full import FullCache
from specd.worker.cache.layers.session_layers import SessionLayers, UnsupportedCacheError
from specd.worker.cache.layers.window import WindowCache
from specd.worker.engine.forward import BareCache, Feed, enable_batches, forward
from tests.worker.models import SMALL, TINY_VOCABULARY_SIZE

WINDOW, SLACK = 8, 6
SLIDING_THEN_FULL = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
# What differs from SMALL, by the model of mlx-lm.
NETWORKS: dict[str, dict[str, Any]] = {
    "llama": SLIDING_THEN_FULL,
    "gemma3_text": {"sliding_window": WINDOW, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
    "olmo3": SLIDING_THEN_FULL,
    "cohere2": {"sliding_window": WINDOW, "sliding_window_pattern": 2, "layer_norm_eps": 1e-5, "logit_scale": 1.0},
    "gpt_oss": SLIDING_THEN_FULL
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "initial_context_length": 64,
        "rope_scaling": {"rope_type": "default"},
    },
    "exaone4": {
        "sliding_window": WINDOW,
        "sliding_window_pattern": "LLLG",
        "rope_scaling": {"rope_type": "default"},
    },
    "deepseek_v32": {
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 1000,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": None,
        "num_key_value_heads": 4,
    },
}


@cache
def make_network(name: str) -> Any:
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(0)
    sizes = SMALL | {"num_hidden_layers": 4} | NETWORKS[name]
    network = module.Model(module.ModelArgs.from_dict({"model_type": name} | sizes))
    network.update(tree_map(lambda w: 3.0 * w if w.ndim > 1 else w, network.parameters()))
    mx.eval(network.parameters())
    return network


token_ids = st.integers(0, TINY_VOCABULARY_SIZE - 1)


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make buffers move with a few tokens, so that windows lose what they cannot go back to."""
    monkeypatch.setattr(FullCache, "step", 4)
    monkeypatch.setattr(window_module, "_SLACK", SLACK)


def feed(layers: SessionLayers, network: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    (logits,) = forward([Feed(BareCache(network, layers, False), mx.array(ids))])
    return np.array(logits)


@pytest.mark.parametrize("name", NETWORKS)
@settings(max_examples=20)
@given(st.data())
def test_any_feeds_rewinds_and_copies_give_what_one_pass_over_all_tokens_gives(name: str, data: st.DataObject) -> None:
    network = make_network(name)
    held: list[tuple[SessionLayers, list[int]]] = [(SessionLayers(network), [])]
    for _ in range(data.draw(st.integers(1, 12))):
        i = data.draw(st.integers(0, len(held) - 1))
        layers, tokens = held[i]
        match data.draw(st.sampled_from(["feed", "feed", "rewind", "copy"])):
            case "feed":
                widths = st.one_of(st.integers(1, 3), st.integers(WINDOW - 1, 3 * WINDOW))
                ids = data.draw(widths.flatmap(lambda n: st.lists(token_ids, min_size=n, max_size=n)))
                logits = feed(layers, network, ids)
                tokens += ids
                expected = np.array(network(mx.array([tokens]))[0])[-len(ids) :]
                np.testing.assert_allclose(logits, expected, atol=2e-3 * float(np.abs(expected).max()))
            case "rewind":
                position = data.draw(st.integers(0, len(tokens)))
                reached = layers.rewind(position)
                assert reached in {0, position}
                del tokens[reached:]
            case "copy":
                position = layers.can_serve(data.draw(st.integers(0, len(tokens))))
                if position:
                    held.append((layers.copy(position), tokens[:position]))
        assert {layers.num_fed for layers, _ in held[i : i + 1]} == {len(tokens)}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_session_in_a_batch_gets_what_it_gets_alone(name: str) -> None:
    network = make_network(name)
    batches = enable_batches(network)
    rng = np.random.default_rng(0)
    together, alone = ([BareCache(network, SessionLayers(network), batches) for _ in range(3)] for _ in range(2))
    for _ in range(12):
        tokens = [mx.array(rng.integers(0, TINY_VOCABULARY_SIZE, rng.integers(1, 12))) for _ in together]
        outputs = forward([Feed(own, ids) for own, ids in zip(together, tokens, strict=True)])
        for own, other, ids, logits in zip(together, alone, tokens, outputs, strict=True):
            expected = np.array(forward([Feed(other, ids)])[0])
            np.testing.assert_allclose(np.array(logits), expected, atol=1e-3 * float(np.abs(expected).max()))
            position = other.layers.num_fed - int(rng.integers(0, 5))
            assert own.layers.rewind(max(position, 0)) == other.layers.rewind(max(position, 0))


def test_a_session_can_go_back_by_the_slack_at_any_time() -> None:
    network = make_network("llama")
    layers = SessionLayers(network)
    for i in range(100):
        feed(layers, network, [i % TINY_VOCABULARY_SIZE] * (1 + i % 3))
        assert layers.can_serve(max(layers.num_fed - SLACK, 0)) == max(layers.num_fed - SLACK, 0)


def test_a_window_stops_growing() -> None:
    window = WindowCache(WINDOW)
    sizes = set()
    for i in range(400):
        window.update_and_fetch(*(mx.ones((1, 2, 1 + i % 5, 8)) for _ in range(2)))
        if i > 50:
            sizes.add(sum(array.nbytes for array in window.arrays))
    assert max(sizes) <= 2 * 2 * 8 * 4 * (WINDOW + SLACK + 2 * 8)


def test_what_cannot_be_rewound_is_refused_by_name() -> None:
    class Recurrent:
        def make_cache(self) -> list[Any]:
            from mlx_lm.models.cache import ArraysCache

            return [ArraysCache(2)]

    with pytest.raises(UnsupportedCacheError, match="ArraysCache"):
        SessionLayers(Recurrent())  # type: ignore[arg-type]
