"""The MTP head: its equality with the reference, its chains, its batches, and its rewinds."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from specd.worker.engine.batch_layer import BatchLayer
from specd.worker.engine.cache_users import watch_cache_users
from specd.worker.engine.forward import enable_batches
from specd.worker.heads.head import Head
from specd.worker.layers.full import FullCache
from specd.worker.layers.session_layers import SessionLayers
from specd.worker.model.head_loader import load_head
from tests.worker.head_files import FAMILIES, Target, Tensors, converted, raw_head, save_beside, save_target
from tests.worker.head_reference import states_of

SIZE, VOCABULARY = 32, 8192

Made = tuple[Target, Tensors, Head]


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Make a target that computes several sessions at once, the raw tensors of its head, and the head."""
    target = save_target(tmp_path_factory.mktemp("heads") / request.param, request.param)
    watch_cache_users(target.network, by_session=False)
    assert enable_batches(target.network)
    raw = raw_head(target.text)
    save_beside(target.directory, "mtp.safetensors", converted(raw))
    head = load_head(target.network, target.directory, batches=True)
    assert head is not None
    return target, raw, head


def pairs(seed: int, n: int) -> tuple[mx.array, mx.array]:
    """Return n random tokens [1, n] and hidden states [1, n, size]."""
    keys = mx.random.split(mx.random.key(seed))
    return mx.random.randint(0, VOCABULARY, (1, n), key=keys[0]), mx.random.normal((1, n, SIZE), key=keys[1])


def feed(head: Head, layers: SessionLayers, tokens: mx.array, hidden: mx.array) -> mx.array:
    """Feed pairs to a session of a head, and return its states."""
    states = head(tokens, hidden, layers.caches)
    layers.fed(tokens.shape[1])
    return states


def weights_of(network: Any) -> list[mx.array]:
    named: Any = tree_flatten(network.parameters())
    return [weight for _, weight in named]


def test_a_head_owns_one_layer_and_none_of_the_targets_weights(made: Made) -> None:
    target, raw, head = made
    own, targets = weights_of(head), weights_of(target.network)
    assert sum(weight.size for weight in own) == sum(tensor.size for tensor in raw.values())
    assert not {id(weight) for weight in own} & {id(weight) for weight in targets}
    (cache,) = SessionLayers(head).caches
    assert type(cache) is FullCache


def test_a_chain_of_drafts_gives_the_references_logits(made: Made) -> None:
    """The state of a pair is the hidden state of the next one, for tokens that were drafted."""
    target, raw, head = made
    tokens, hidden = pairs(1, 6)
    layers = SessionLayers(head)
    states = feed(head, layers, tokens, hidden)
    drafted = []
    for _ in range(4):
        token = mx.argmax(head.logits(states[:, -1:]), axis=-1)
        drafted.append(int(token))
        tokens = mx.concatenate([tokens, token], axis=1)
        hidden = mx.concatenate([hidden, states[:, -1:]], axis=1)
        states = feed(head, layers, token, states[:, -1:])

    embedded = np.array(head.states.embed(tokens)[0], np.float64)
    known = np.array(hidden[0, :6], np.float64)
    for i in range(5):
        expected = states_of(raw, target.text, embedded[: 6 + i], known)
        logits = np.array(head.logits(mx.array(expected.astype(np.float32))))
        if i < 4:
            assert int(logits[-1].argmax()) == drafted[i]
        known = np.concatenate([known, expected[-1:]])
    np.testing.assert_allclose(np.array(head.logits(states))[0, -1], logits[-1], atol=1e-4)


def test_a_batch_of_sessions_gives_the_states_of_each_alone(made: Made) -> None:
    """Pairs are [tokens, 1] then, as in the target's own passes over several sessions."""
    _, _, head = made
    lengths, firsts = (1, 4, 2), (3, 1, 5)
    sessions, alone = [SessionLayers(head) for _ in lengths], [SessionLayers(head) for _ in lengths]
    for i, first in enumerate(firsts):
        for layers in (sessions[i], alone[i]):
            mx.eval(feed(head, layers, *pairs(i, first)))
    own = [pairs(10 + i, n) for i, n in enumerate(lengths)]
    spans = [slice(end - n, end) for end, n in zip(accumulate(lengths), lengths, strict=True)]
    offsets = mx.array([first + i for first, n in zip(firsts, lengths, strict=True) for i in range(n)])
    batch = BatchLayer([layers.caches[0] for layers in sessions], spans, offsets)
    tokens, hidden = (mx.concatenate([*parts], axis=1).swapaxes(0, 1) for parts in zip(*own, strict=True))
    states = head(tokens, hidden, [batch])
    assert states.shape == (sum(lengths), 1, SIZE)
    for span, layers, each in zip(spans, alone, own, strict=True):
        np.testing.assert_allclose(np.array(states[span, 0]), np.array(feed(head, layers, *each)[0]), atol=1e-5)


@settings(max_examples=20)
@given(data=st.data())
def test_after_any_feeds_rewinds_and_copies_a_head_gives_what_a_fresh_one_gives(
    made: Made, data: st.DataObject
) -> None:
    _, _, head = made
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "step", 4)  # so that buffers move with a few pairs
        held = [(SessionLayers(head), list[int]())]
        for _ in range(data.draw(st.integers(1, 10))):
            i = data.draw(st.integers(0, len(held) - 1))
            layers, seeds = held[i]
            match data.draw(st.sampled_from(["feed", "feed", "rewind", "copy"])):
                case "feed":
                    new = data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=6))
                    states = feed(head, layers, *_together(new))
                    seeds += new
                    fresh = feed(head, SessionLayers(head), *_together(seeds))[:, -len(new) :]
                    np.testing.assert_allclose(np.array(states), np.array(fresh), atol=1e-4)
                case "rewind":
                    position = data.draw(st.integers(0, len(seeds)))
                    assert layers.rewind(position) == position
                    del seeds[position:]
                case "copy" if seeds:
                    position = data.draw(st.integers(1, len(seeds)))
                    held.append((layers.copy(position), seeds[:position]))
            assert layers.num_fed == len(seeds)


def _together(seeds: list[int]) -> tuple[mx.array, mx.array]:
    tokens, hidden = zip(*(pairs(seed, 1) for seed in seeds), strict=True)
    return mx.concatenate([*tokens], axis=1), mx.concatenate([*hidden], axis=1)


def test_a_replay_in_other_chunks_gives_the_same_states(made: Made) -> None:
    """The state is a function of the pairs alone: drafted ones, on guessed hidden states, are rewound."""
    _, _, head = made
    tokens, hidden = pairs(3, 9)
    layers, replayed = SessionLayers(head), SessionLayers(head)
    for start, end in ((0, 3), (3, 5), (5, 9)):
        states = feed(head, layers, tokens[:, start:end], hidden[:, start:end])
        drafted = mx.argmax(head.logits(states[:, -1:]), axis=-1)
        mx.eval(feed(head, layers, drafted, states[:, -1:]))
        assert layers.rewind(end) == end
    expected = feed(head, replayed, tokens, hidden)
    np.testing.assert_allclose(np.array(states), np.array(expected[:, 5:]), atol=1e-5)
    for own, other in zip(layers.last_rows, replayed.last_rows, strict=True):
        np.testing.assert_allclose(np.array(own), np.array(other), atol=1e-5)


def test_a_head_equals_that_of_mlx_vlm(made: Made) -> None:
    """mlx-vlm has many dependencies, of which its head needs none: `pip install --no-deps mlx-vlm` is enough."""
    drafters = pytest.importorskip("mlx_vlm.speculative.drafters.qwen3_5_mtp", reason="mlx-vlm is not installed")
    target, raw, head = made
    text = dict(target.text)
    if text["model_type"] == "qwen3_next":  # as mlx-vlm's splitter completes it
        text["rope_parameters"] = {
            "type": "default", "rope_theta": text["rope_theta"], "partial_rotary_factor": text["partial_rotary_factor"],
            "mrope_section": [2, 0, 0],
        }  # fmt: skip
    theirs = drafters.Model(drafters.ModelConfig.from_dict({"model_type": "qwen3_5_mtp", "text_config": text}))
    theirs.load_weights(list(theirs.sanitize(raw).items()))
    theirs.reset(target.network)
    tokens, hidden = pairs(7, 12)
    largest = 0.0
    layers = SessionLayers(head)
    for start, end in ((0, 7), (7, 8), (8, 12)):
        expected = theirs._forward_tokens(tokens[:, start:end], hidden[:, start:end], mx.int32)
        states = feed(head, layers, tokens[:, start:end], hidden[:, start:end])
        largest = max(largest, float(mx.abs(head.logits(states) - head.logits(expected)).max()))
    print(f"largest difference of logits: {largest:.1e}")
    assert largest < 1e-4
