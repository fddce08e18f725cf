"""The contract of layer caches: after any feeds, rewinds and copies, a network computes what it does without them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import llama
from mlx_lm.models.cache import ArraysCache, ConcatenateKVCache, KVCache, RotatingKVCache, make_prompt_cache

from specd.worker.engine.forms import choose_forms
from specd.worker.engine.forward import BareCache, enable_batches, forward, rewinds_exactly
from specd.worker.engine.jobs import Feed
from specd.worker.engine.static_step import StaticStep
from specd.worker.layers import recurrent
from specd.worker.layers import rows as rows_module
from specd.worker.layers.full import FullCache, QuantizedCache
from specd.worker.layers.parts import flatten
from specd.worker.layers.session_layers import SessionLayers
from specd.worker.layers.window import WindowCache
from tests.worker.families import make_network, make_quantized
from tests.worker.family_kinds import CHUNKS, KINDS, QUANTIZED, STATES, WINDOW
from tests.worker.models import TINY_VOCABULARY_SIZE
from tests.worker.whole_buffers import STATIC, whole_buffers

SLACK = 6

token_ids = st.integers(0, TINY_VOCABULARY_SIZE - 1)


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make buffers move with a few tokens, so that windows lose what they cannot go back to."""
    monkeypatch.setattr(KVCache, "step", 4)
    monkeypatch.setattr(rows_module, "SLACK", SLACK)
    for name, value in {"MOST_TOKENS": 10, "_SPACING": 4, "_MOST_CHECKPOINTS": 2, "_CHECKPOINT_SPACING": 12}.items():
        monkeypatch.setattr(recurrent, name, value)


def feed(layers: SessionLayers, network: Any, ids: list[int], static: StaticStep | None = None) -> np.ndarray[Any, Any]:
    (logits,) = forward([Feed(BareCache(network, layers, False, static), mx.array(ids))])
    return np.array(logits)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=12)
@given(st.data())
def test_any_feeds_rewinds_and_copies_give_what_one_pass_over_all_tokens_gives(name: str, data: st.DataObject) -> None:
    check_contract(name, make_network(name), data)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=12)
@given(st.data())
def test_the_same_holds_for_attention_over_whole_buffers(name: str, data: st.DataObject) -> None:
    with whole_buffers(make_network(name)) as network:
        check_contract(name, network, data)


@pytest.mark.parametrize("name", STATIC)
@settings(max_examples=20)
@given(st.data())
def test_the_same_holds_for_the_static_step(name: str, data: st.DataObject) -> None:
    with whole_buffers(make_network(name)) as network:
        static = StaticStep(network, context_length=data.draw(st.sampled_from([60, 10**6])))
        static.compiles_one = data.draw(st.booleans())
        check_contract(name, network, data, static)


def check_contract(name: str, network: Any, data: st.DataObject, static: StaticStep | None = None) -> None:
    held: list[tuple[SessionLayers, list[int]]] = [(SessionLayers(network), [])]
    for _ in range(data.draw(st.integers(1, 12))):
        i = data.draw(st.integers(0, len(held) - 1))
        layers, tokens = held[i]
        match data.draw(st.sampled_from(["feed", "feed", "rewind", "copy"])):
            case "feed":
                widths = st.one_of(st.integers(1, 3), st.integers(WINDOW - 1, 3 * WINDOW))
                ids = data.draw(widths.flatmap(lambda n: st.lists(token_ids, min_size=n, max_size=n)))
                logits = feed(layers, network, ids, static)
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


@pytest.mark.parametrize("sees_whole_buffers", [False, True])
@pytest.mark.parametrize("name", QUANTIZED)
@settings(max_examples=20)
@given(st.data())
def test_quantised_caches_give_what_a_fresh_one_gives(name: str, sees_whole_buffers: bool, data: st.DataObject) -> None:
    """With values on the border of two levels, which rounding moves by a whole level: 1 % of a logit was seen."""
    network = make_quantized(name)
    network.fixed_shapes = sees_whole_buffers
    layers, tokens = SessionLayers(network), list[int]()
    network.fixed_shapes = False  # for the fresh ones
    for _ in range(data.draw(st.integers(1, 8))):
        match data.draw(st.sampled_from(["feed", "feed", "rewind", "copy"])):
            case "feed":
                ids = data.draw(st.lists(token_ids, min_size=1, max_size=2 * WINDOW))
                logits = feed(layers, network, ids)
                tokens += ids
                expected = feed(SessionLayers(network), network, tokens)[-len(ids) :]
                np.testing.assert_allclose(logits, expected, atol=0.03 * float(np.abs(expected).max()))
            case "rewind":
                del tokens[layers.rewind(data.draw(st.integers(0, len(tokens)))) :]
            case "copy":
                if position := layers.can_serve(len(tokens)):
                    layers = layers.copy(position)


@pytest.mark.parametrize("bits", [8, 4])
@given(st.data())
def test_a_quantised_cache_keeps_each_row_as_if_it_had_come_alone(bits: int, data: st.DataObject) -> None:
    mx.random.seed(0)
    everything = mx.random.normal((2, 1, 2, 60, 32))
    cache = QuantizedCache(32, bits)
    for _ in range(data.draw(st.integers(1, 12))):
        n = data.draw(st.integers(1, 60 - cache.offset))
        kept = cache.update_and_fetch(*everything[..., cache.offset : cache.offset + n, :])
        for quantized, plain in zip(kept, everything, strict=True):
            for array, expected in zip(quantized, mx.quantize(plain[..., : cache.offset, :], 32, bits), strict=True):
                assert mx.array_equal(array, expected)
        cache.rewind(data.draw(st.integers(0, min(cache.offset, 59))))
        if cache.offset and data.draw(st.booleans()):
            cache = cache.copy(data.draw(st.integers(1, cache.offset)))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group_size", [32, 64])
def test_a_quantised_number_takes_its_bits_and_a_share_of_scale_and_bias(bits: int, group_size: int) -> None:
    plain, quantized = FullCache(), QuantizedCache(group_size, bits)
    for cache in (plain, quantized):
        cache.update_and_fetch(*(mx.ones((1, 2, 3, 64)) for _ in range(2)))
    assert quantized.footprint.bytes_for(1) == plain.footprint.bytes_for(1) * (bits + 64 / group_size) / 32


@pytest.mark.parametrize("name", QUANTIZED)
def test_sessions_with_quantised_caches_go_together(name: str) -> None:
    network = make_quantized(name)
    assert enable_batches(network)
    sessions = [BareCache(network, SessionLayers(network), True) for _ in range(3)]
    alone = [SessionLayers(network) for _ in sessions]
    for ids in ([1, 2, 3], [4], [5, 6, 7, 8, 9]):
        outputs = forward([Feed(own, mx.array([i, *ids])) for i, own in enumerate(sessions)])
        for i, (own, logits) in enumerate(zip(alone, outputs, strict=True)):
            expected = feed(own, network, [i, *ids])
            np.testing.assert_allclose(np.array(logits), expected, atol=0.03 * float(np.abs(expected).max()))


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


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40))
def test_a_window_stops_growing(widths: list[int]) -> None:
    window = WindowCache(WINDOW)
    for n in [*widths, *[1] * (FullCache.step + 1)]:  # a long prefill leaves a large buffer, for as long as it has room
        window.update_and_fetch(*(mx.ones((1, 2, n, 8)) for _ in range(2)))
    assert sum(array.nbytes for array in window.arrays) <= window.footprint.bytes_for(10**9)
    assert window.footprint.bytes_for(10**9) == 2 * 2 * 8 * 4 * (WINDOW - 1 + SLACK + FullCache.step)


@pytest.mark.parametrize("name", KINDS)
def test_a_session_takes_no_more_than_its_footprint(name: str) -> None:
    """With room for more: of full attention up to the next multiple of the step, of states a pass in the making."""
    network = make_network(name)
    layers = SessionLayers(network)
    feed(layers, network, [1])
    footprint = layers.footprint
    rng = np.random.default_rng(0)
    for _ in range(60):
        feed(layers, network, [*map(int, rng.integers(0, TINY_VOCABULARY_SIZE, rng.integers(1, 5)))])
        assert layers.nbytes <= footprint.bytes_for(layers.num_fed + 2 * FullCache.step)
        layers.rewind(layers.num_fed - 1)


@pytest.mark.parametrize("name", STATES)
def test_a_state_goes_back_by_a_proposal_without_its_prompt(name: str) -> None:
    """And to the end of the prompt, for the next session that begins with it, in a session of any length."""
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
        states = [part for part in flatten(layers.caches) if isinstance(part, recurrent.RecurrentCache)]
        sizes.append(sum(array.nbytes for state in states for array in state.arrays))
    assert max(sizes[60:]) <= max(sizes[:60])


class Odd(llama.Model):
    """A network with caches that no other has: one that says it can be trimmed and cannot, and a ring that writes."""

    def make_cache(self) -> list[Any]:
        return [*(ConcatenateKVCache() for _ in self.layers[:-1]), RotatingKVCache(3 * WINDOW, keep=2)]


@settings(max_examples=50)
@given(st.data())
def test_caches_of_unknown_classes_go_back_by_their_copies(data: st.DataObject) -> None:
    network = make_network("llama")
    plain = type(network)
    network.__class__ = Odd
    try:
        layers, tokens = SessionLayers(network), list[int]()
        for _ in range(data.draw(st.integers(1, 12))):
            ids = data.draw(st.lists(token_ids, min_size=1, max_size=WINDOW))
            logits = feed(layers, network, ids)
            tokens += ids
            fresh = SessionLayers(network)
            expected = np.concatenate([feed(fresh, network, [token]) for token in tokens])[-len(ids) :]
            np.testing.assert_allclose(logits, expected, atol=2e-3 * float(np.abs(expected).max()))
            if data.draw(st.booleans()):
                layers = layers.copy(layers.can_serve(len(tokens)))
            reached = layers.rewind(data.draw(st.integers(0, len(tokens))))
            del tokens[reached:]
    finally:
        network.__class__ = plain


def test_forms_are_chosen_for_caches_of_unknown_classes() -> None:
    """Their rewinds reach less than was asked for, in each form alike."""
    network = make_network("llama")
    plain = type(network)
    network.__class__ = Odd
    try:
        static, sharing = choose_forms(network, batches=False, context_length=512, bytes_per_token=64)
        assert static is None
        assert sharing is None
    finally:
        network.__class__ = plain
        network.fixed_shapes = False


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
