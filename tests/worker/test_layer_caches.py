"""The contract of layer caches: after any feeds, rewinds and copies, a network computes what it does without them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import llama
from mlx_lm.models.cache import ArraysCache, ConcatenateKVCache, make_prompt_cache

from specd.worker.cache.layers import recurrent
from specd.worker.cache.layers import window as window_module
from specd.worker.cache.layers.full import FullCache
from specd.worker.cache.layers.session_layers import SessionLayers, UnsupportedCacheError
from specd.worker.cache.layers.window import WindowCache
from specd.worker.engine.forward import BareCache, Feed, enable_batches, forward, rewinds_exactly
from tests.worker.families import CHUNKS, KINDS, STATES, WINDOW, make_network
from tests.worker.models import TINY_VOCABULARY_SIZE

SLACK = 6

token_ids = st.integers(0, TINY_VOCABULARY_SIZE - 1)


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make buffers move with a few tokens, so that windows lose what they cannot go back to."""
    monkeypatch.setattr(FullCache, "step", 4)
    monkeypatch.setattr(window_module, "SLACK", SLACK)
    for name, value in {"MOST_TOKENS": 10, "SPACING": 4, "MOST_CHECKPOINTS": 2, "CHECKPOINT_SPACING": 12}.items():
        monkeypatch.setattr(recurrent, f"_{name}", value)


def feed(layers: SessionLayers, network: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    (logits,) = forward([Feed(BareCache(network, layers, False), mx.array(ids))])
    return np.array(logits)


@pytest.mark.parametrize("name", KINDS)
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
                assert reached <= position
                if name not in STATES:
                    assert reached in {0, position}
                del tokens[reached:]
            case "copy":
                position = layers.can_serve(data.draw(st.integers(0, len(tokens))))
                if position:
                    held.append((layers.copy(position), tokens[:position]))
        assert {layers.num_fed for layers, _ in held[i : i + 1]} == {len(tokens)}


@pytest.mark.parametrize("name", KINDS)
def test_a_session_in_a_batch_gets_what_it_gets_alone(name: str) -> None:
    network = make_network(name)
    batches = enable_batches(network)
    assert batches is (name not in CHUNKS)  # these compute masks from one offset: their sessions take turns
    rng = np.random.default_rng(0)
    together, alone = ([BareCache(network, SessionLayers(network), batches) for _ in range(3)] for _ in range(2))
    for _ in range(12):
        tokens = [mx.array(rng.integers(0, TINY_VOCABULARY_SIZE, rng.integers(1, 12))) for _ in together]
        outputs = forward([Feed(own, ids) for own, ids in zip(together, tokens, strict=True)])
        for own, other, ids, logits in zip(together, alone, tokens, outputs, strict=True):
            expected = np.array(forward([Feed(other, ids)])[0])
            np.testing.assert_allclose(np.array(logits), expected, atol=1e-3 * float(np.abs(expected).max()))
            position = max(other.layers.num_fed - int(rng.integers(0, 5)), 0)
            assert own.layers.rewind(position) == other.layers.rewind(position)


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


@pytest.mark.parametrize("name", STATES)
def test_a_state_goes_back_by_a_proposal_without_its_prompt(name: str) -> None:
    """And to the end of the prompt, for the next session that begins with it, however long the session gets."""
    network = make_network(name)
    layers = SessionLayers(network)
    feed(layers, network, [1, 2, 3] * 10)
    for _ in range(30):
        feed(layers, network, [5, 6, 7])
        assert layers.can_serve(layers.num_fed - 2) == layers.num_fed - 2
        layers.rewind(layers.num_fed - 2)
        if name not in {"recurrent_gemma", "baichuan_m1"}:  # these have windows as well, which go back less far
            assert layers.can_serve(31) in {30, 31}


@pytest.mark.parametrize("name", STATES)
def test_states_take_no_more_memory_in_a_long_session(name: str) -> None:
    network = make_network(name)
    layers = SessionLayers(network)
    sizes = []
    for _ in range(120):
        feed(layers, network, [5, 6, 7])
        layers.rewind(layers.num_fed - 2)
        parts = [part for each in layers.caches for part in getattr(each, "caches", (each,))]
        states = [part for part in parts if isinstance(part, recurrent.RecurrentCache)]
        sizes.append(sum(array.nbytes for state in states for array in state.arrays))
    assert max(sizes[60:]) <= max(sizes[:60])


def test_what_cannot_be_rewound_is_refused_by_name() -> None:
    class Concatenating:
        def make_cache(self) -> list[Any]:
            return [ConcatenateKVCache()]

    with pytest.raises(UnsupportedCacheError, match="ConcatenateKVCache"):
        SessionLayers(Concatenating())  # type: ignore[arg-type]


class Unseen(llama.Model):
    """A network with a state that it changes itself, in no module that gets the cache."""

    def __call__(self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        state = cache[-1]
        logits: mx.array = super().__call__(inputs, cache[:-1])
        state[0] = mx.sum(inputs) + (0 if state[0] is None else state[0])
        return logits + state[0]

    def make_cache(self) -> list[Any]:
        return [*make_prompt_cache(llama.Model(self.args)), ArraysCache(1)]


def test_a_network_whose_state_changes_unseen_is_found_out() -> None:
    network = make_network("llama")
    assert rewinds_exactly(network)
    plain = type(network)
    network.__class__ = Unseen
    try:
        assert not rewinds_exactly(network)
    finally:
        network.__class__ = plain
