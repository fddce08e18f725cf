"""The hidden states of a network's passes: whole, single, batched, compiled, and without logits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.nn.layers.base import Module

from specd.worker.engine.forward import BareCache, bare_cache, enable_batches, forward
from specd.worker.engine.jobs import Feed
from specd.worker.engine.shared_rows import Sharing
from specd.worker.engine.static_step import StaticStep
from specd.worker.heads.hidden import HiddenStates
from specd.worker.heads.trials import states_are_right
from specd.worker.layers.session_layers import SessionLayers
from specd.worker.model.loader import load
from tests.worker.families import make_network, save_family
from tests.worker.models import small_network
from tests.worker.whole_buffers import whole_buffers

# With a layer of its own for the logits, and with the embedding; with experts, and with multi-head latent attention.
TARGETS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "glm4_moe_lite", "mimo", "deepseek_v3", "exaone_moe", "ernie4_5_moe")
CAPPED = ("gemma2", "gemma3n", "gemma4", "gemma4_text")


def untied(name: str) -> Any:
    return small_network(name, tie_word_embeddings=False)


@pytest.mark.parametrize("name", [*TARGETS, *CAPPED])
def test_the_output_layer_makes_the_logits_of_the_states(name: str) -> None:
    network = make_network(name)
    batches = enable_batches(network)
    assert states_are_right(HiddenStates(network), network, batches=batches)


@pytest.mark.parametrize("make", [partial(small_network, "qwen3"), partial(untied, "qwen3")])
def test_a_pass_leaves_the_network_as_it_was(make: Any) -> None:
    network = make()
    ids = mx.array([[1, 2, 3, 4]])
    expected = network(ids)
    kinds = [type(part) for part in network.modules()]
    logits, hidden = HiddenStates(network).run(ids, SessionLayers(network).caches)
    np.testing.assert_array_equal(np.array(logits), np.array(expected))
    assert hidden.shape == (1, 4, 32)
    np.testing.assert_array_equal(np.array(hidden), np.array(network.model(ids)))
    assert [type(part) for part in network.modules()] == kinds


def test_a_batch_has_the_states_of_its_sessions() -> None:
    """A batch is [tokens, 1]; each session's rows are those of the session alone."""
    network = small_network("qwen3")
    assert enable_batches(network)
    states = HiddenStates(network)
    texts = [[1, 2, 3], [4], [5, 6]]
    seen: list[mx.array] = []

    def watched(ids: mx.array, cache: Sequence[Any]) -> mx.array:
        logits, hidden = states.run(ids, cache)
        seen.append(hidden)
        return logits

    network_of_batch: Any = watched
    forward([Feed(BareCache(network_of_batch, bare_cache(network).layers, True), mx.array(ids)) for ids in texts])
    (hidden,) = seen
    assert hidden.shape == (6, 1, 32)
    alone = [states.run(mx.array([ids]), SessionLayers(network).caches)[1][0] for ids in texts]
    np.testing.assert_allclose(np.array(hidden[:, 0]), np.array(mx.concatenate(alone)), atol=1e-5)


def test_a_network_that_changes_its_logits_is_told_apart() -> None:
    """RecurrentGemma caps the logits behind its output layer, under a name of its own."""
    network = make_network("recurrent_gemma")
    assert not states_are_right(HiddenStates(network), network, batches=False)


@pytest.mark.parametrize("name", CAPPED)
def test_another_cap_is_told_apart(name: str) -> None:
    network = make_network(name)
    states = HiddenStates(network)
    for cap in (None, 25.0, 35.0):
        states._cap = cap
        assert not states_are_right(states, network, batches=False)


class _Misled(HiddenStates):
    """States of a network that are wrong in passes of one form."""

    def __init__(self, network: Module, form: str) -> None:
        super().__init__(network)
        self._form = form

    def run(self, token_ids: mx.array, cache: Sequence[Any]) -> tuple[mx.array, mx.array]:
        logits, hidden = super().run(token_ids, cache)
        form = "batch" if token_ids.shape[0] > 1 else "single" if token_ids.size == 1 else "whole"
        return logits, 1.01 * hidden if form == self._form else hidden


@pytest.mark.parametrize("form", ["whole", "single", "batch"])
@pytest.mark.parametrize("make", [partial(small_network, "qwen3"), partial(make_network, "gemma4")])
def test_the_trial_sees_wrong_states_in_every_form(make: Any, form: str) -> None:
    network = make()
    assert enable_batches(network)
    assert states_are_right(_Misled(network, "none"), network, batches=True)
    assert not states_are_right(_Misled(network, form), network, batches=True)


def test_a_network_without_an_output_layer_is_told_apart() -> None:
    with pytest.raises(ValueError, match="no embed_tokens"):
        HiddenStates(nn.Sequential(nn.Linear(2, 2)))

    network = untied("qwen3")
    network.args.tie_word_embeddings = True  # so that it never calls its lm_head
    assert not states_are_right(HiddenStates(network), network, batches=False)


def test_logits_that_are_not_evaluated_are_not_computed() -> None:
    """As in a prefill: its logits would take 64 MiB, which MLX's peak of memory shows."""
    rows, length = 2**17, 128
    network = small_network("qwen3", vocab_size=rows)
    states = HiddenStates(network)
    layers = SessionLayers(network)
    ids = mx.zeros((1, length), mx.uint32)
    logits, hidden = states.run(ids, layers.caches)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(hidden, layers.arrays)
    assert mx.get_peak_memory() - before < rows * length * 4 // 8
    mx.eval(logits)
    assert mx.get_peak_memory() - before >= rows * length * 4


def test_compiled_passes_return_the_states_as_an_output() -> None:
    """The engine's own compiled pass and its shared rows, each for several positions of one description."""
    with whole_buffers(small_network("qwen3", tie_word_embeddings=False), compiles=True) as network:
        states = HiddenStates(network)

        class Both:
            fixed_shapes = True
            layers = network.layers

            def __call__(self, token_ids: mx.array, cache: Sequence[Any]) -> mx.array:
                return mx.concatenate([*states.run(token_ids, cache)], axis=-1)

        both: Any = Both()
        static = StaticStep(both, context_length=10**6)
        for sharing in (None, Sharing(static, 2**30)):
            sessions = [BareCache(both, SessionLayers(network), False, static, sharing) for _ in range(2)]
            texts: list[list[int]] = [[], []]
            for ids in ([1, 2, 3], [4, 5], [6, 7], [8]):
                own = [ids, ids[::-1]]
                outputs = forward([Feed(each, mx.array(tokens)) for each, tokens in zip(sessions, own, strict=True)])
                for text, tokens, output in zip(texts, own, outputs, strict=True):
                    text.extend(tokens)
                    expected = network.model(mx.array([text]))[0, -len(tokens) :]
                    np.testing.assert_allclose(np.array(output[:, -32:]), np.array(expected), atol=1e-4)


def test_a_state_that_a_compiled_function_does_not_return_is_a_placeholder() -> None:
    network = small_network("qwen3")
    states = HiddenStates(network)
    no_cache = [None] * 2
    leaked: list[mx.array] = []

    def traced(ids: mx.array) -> mx.array:
        logits, hidden = states.run(ids, no_cache)
        leaked.append(hidden)
        return logits

    mx.eval(mx.compile(traced)(mx.array([[1, 2]])))
    with pytest.raises(RuntimeError, match="make sure all the inputs and outputs are captured"):
        mx.eval(leaked)
    compiled = mx.compile(lambda ids: states.run(ids, no_cache))
    for ids in ([[1, 2]], [[3, 4]]):
        _, hidden = compiled(mx.array(ids))
        np.testing.assert_allclose(np.array(hidden), np.array(network.model(mx.array(ids))), atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_the_states_are_right_in_a_model_as_a_worker_loads_it(name: str, tmp_path: Any) -> None:
    """With packed weights, where this CPU has them, and with recorded arguments of recurrent layers."""
    model = load(save_family(tmp_path / "model", name), blas="", is_optimized=True)
    assert model.batches
    assert states_are_right(HiddenStates(model.network), model.network, batches=True)
