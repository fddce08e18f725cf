"""The network of T5s equals transformers, for any feeds, rewinds and batches."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model
from numpy.typing import NDArray

from specd.worker.cpu.network import replace_function
from specd.worker.engine.batch_layer import attention_for_batches
from specd.worker.engine.forward import BareCache, forward
from specd.worker.engine.jobs import Feed
from specd.worker.layers.session_layers import SessionLayers
from specd.worker.model.t5.arguments import Arguments
from specd.worker.model.t5.network import T5
from specd.worker.model.t5.relative_positions import buckets
from tests.worker.t5_reference import DIRECTORY, SOURCE_LENGTHS, VARIANTS, answer, source

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def network(variant: str) -> T5:
    return load(DIRECTORY / variant)


@pytest.fixture(scope="module")
def expected(variant: str) -> dict[str, NDArray[np.float32]]:
    arrays: Any = mx.load(str(DIRECTORY / variant / "expected.safetensors"))
    return {name: np.array(array) for name, array in arrays.items()}


def load(directory: Path) -> T5:
    network, _ = load_model(directory, get_model_classes=lambda config: (T5, Arguments))
    assert isinstance(network, T5)
    return network


def begin(network: T5, length: int) -> BareCache:
    """Return caches that hold a source of this length."""
    layers = SessionLayers(network)
    *_, encoded = network.encode(mx.array([source(length)]))
    network.read(encoded, layers.caches)
    return BareCache(network, layers, True)


def feed(*pairs: tuple[BareCache, list[int]]) -> list[NDArray[np.float32]]:
    return [np.array(logits) for logits in forward([Feed(cache, mx.array(tokens)) for cache, tokens in pairs])]


@pytest.mark.parametrize("length", SOURCE_LENGTHS)
def test_the_encoder(network: T5, expected: dict[str, NDArray[np.float32]], length: int) -> None:
    *_, encoded = network.encode(mx.array([source(length)]))
    np.testing.assert_allclose(np.array(encoded[0]), expected[f"encoded {length}"], atol=TOLERANCE)


@pytest.mark.parametrize("length", SOURCE_LENGTHS)
@pytest.mark.parametrize("width", [1, 3, 7, len(answer())])
def test_the_decoder(network: T5, expected: dict[str, NDArray[np.float32]], length: int, width: int) -> None:
    cache = begin(network, length)
    tokens = answer()
    logits = [feed((cache, tokens[i : i + width]))[0] for i in range(0, len(tokens), width)]
    np.testing.assert_allclose(np.concatenate(logits), expected[f"logits {length}"], atol=TOLERANCE)


def test_rewinds_copies_and_batches(network: T5, expected: dict[str, NDArray[np.float32]]) -> None:
    """Sessions with sources of different lengths, in the same passes, with wrong tokens that are rewound."""
    rng = random.Random(0)
    replace_function(network, "scaled_dot_product_attention", attention_for_batches, mark="takes_batches")
    caches = [begin(network, length) for length in SOURCE_LENGTHS]
    tokens = answer()
    while unfinished := [i for i, cache in enumerate(caches) if cache.layers.num_fed < len(tokens)]:
        together = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        rights, fed = [], []
        for i in together:
            at = caches[i].layers.num_fed
            right = tokens[at : at + rng.randint(1, 5)]
            rights.append((at, right))
            fed.append((caches[i], right + [rng.randrange(48) for _ in range(rng.randint(0, 4))]))
        for i, (at, right), logits in zip(together, rights, feed(*fed), strict=True):
            of_all = expected[f"logits {SOURCE_LENGTHS[i]}"]
            np.testing.assert_allclose(logits[: len(right)], of_all[at : at + len(right)], atol=TOLERANCE)
            assert caches[i].layers.rewind(at + len(right)) == at + len(right)
            if rng.random() < 0.3:
                caches[i] = BareCache(network, caches[i].layers.copy(at + rng.randint(0, len(right))), True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_buckets(is_causal: bool) -> None:
    """As the paper has them: near distances each, then ever more in one, up to the largest distance."""
    own = buckets(np.arange(-300, 301), 32, 128, is_causal=is_causal)
    later, same, earlier = own[:300][::-1], own[300], own[301:]
    assert same == 0
    half = 32 if is_causal else 16
    exact = half // 2
    assert earlier[: exact - 1].tolist() == [*range(1, exact)]
    assert (np.diff(earlier) >= 0).all()
    assert set(earlier[127:]) == {half - 1}
    assert set(earlier) == {*range(1, half)}
    assert later.tolist() == ([0] * 300 if is_causal else (earlier + 16).tolist())


def _gelu(x: float) -> float:
    return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))


def _gelu_new(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("relu", lambda x: max(x, 0.0)),
        ("gelu", _gelu),
        ("silu", lambda x: x / (1 + math.exp(-x))),
        ("gated-relu", lambda x: max(x, 0.0)),
        ("gated-gelu", _gelu_new),
        ("gated-silu", lambda x: x / (1 + math.exp(-x))),
    ],
)
def test_activations_are_those_of_transformers(name: str, formula: Callable[[float], float]) -> None:
    """In its T5Config, "gated-gelu" means gelu_new, and "gelu" the one by erf: they differ by up to 4.7e-4."""
    arguments = Arguments("t5", 48, 16, 8, 24, 2, 3, feed_forward_proj=name)
    assert arguments.is_gated == name.startswith("gated-")
    inputs = [i / 50 for i in range(-300, 301)]
    outputs = np.array(arguments.activation(mx.array(inputs)))
    np.testing.assert_allclose(outputs, [*map(formula, inputs)], atol=2e-6)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="feed_forward_proj is 'gated-swish'"):
        Arguments("t5", 48, 16, 8, 24, 2, 3, feed_forward_proj="gated-swish")


def test_the_embedding_by_any_name_and_a_head_that_equals_it() -> None:
    """MADLAD has the decoder's only; the oldest have all, a head, and a bias that means nothing."""
    weights: Any = mx.load(str(DIRECTORY / "t5-v1.0" / "model.safetensors"))
    network = load(DIRECTORY / "t5-v1.0")
    plain = {name: array for name, array in weights.items() if name != "shared.weight"}
    embedding = weights["shared.weight"]
    only_the_decoders = plain | {"decoder.embed_tokens.weight": embedding}
    unused = {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": mx.ones((8, 3))}
    copies = ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head")
    everything = plain | {f"{name}.weight": embedding for name in copies} | unused
    wanted = network.sanitize(dict(weights))
    for other in (only_the_decoders, everything):
        assert network.sanitize(other).keys() == wanted.keys()
    assert "lm_head" not in network
    assert network.sanitize(plain | {"shared.weight": embedding, "lm_head.weight": 2 * embedding}).keys() == {
        *wanted,
        "lm_head.weight",
    }
