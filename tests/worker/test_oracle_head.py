"""The heads of the tests: what they propose is known, so that rounds with them can be checked."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import mlx.core as mx
import pytest

from specd.worker.engine.batch_layer import BatchLayer
from specd.worker.layers.session_layers import SessionLayers
from tests.worker.families import make_network
from tests.worker.models import TINY_VOCABULARY_SIZE
from tests.worker.oracle_head import OracleHead, greedy_drafts

NETWORKS = ("llama", "qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe_lite")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def greedy(network: Any, text: list[int], n: int) -> list[int]:
    tokens = list(text)
    while len(tokens) < len(text) + n:
        tokens.append(int(mx.argmax(network(mx.array([tokens]))[0, -1])))
    return tokens[len(text) :]


def pairs_of(head: OracleHead, network: Any, text: list[int], start: int = 0) -> tuple[mx.array, mx.array]:
    """Return the pairs of a text from `start` on, of the target's hidden states and the tokens that follow."""
    _, hidden = head.states.run(mx.array([text]), SessionLayers(network).caches)
    return mx.array([text[start + 1 :]]), hidden[:, start:-1]


@pytest.mark.parametrize("name", NETWORKS)
def test_an_oracle_drafts_the_targets_continuation(name: str) -> None:
    """Round by round, with rewinds of its guesses, and after a rewind into the text."""
    network = make_network(name)
    head, k = OracleHead(network), 4
    layers, text = SessionLayers(head), list(PROMPT)
    for _ in range(3):
        expected = greedy(network, text, k)
        assert greedy_drafts(head, layers, *pairs_of(head, network, text, layers.num_fed), k) == expected
        text += expected
    other = [*text[:5], 7, 11]
    assert layers.rewind(4) == 4
    drafted = greedy_drafts(head, layers, *pairs_of(head, network, other, 4), k)
    assert drafted == greedy(network, other, k)


@pytest.mark.parametrize("right", [0.0, 0.7])
def test_a_noisy_oracle_is_right_as_often_as_it_should(right: float) -> None:
    network = make_network("llama")
    head = OracleHead(network, right=right)
    text: Any = mx.random.randint(0, TINY_VOCABULARY_SIZE, (400,), key=mx.random.key(0)).tolist()
    states = head(*pairs_of(head, network, text), SessionLayers(head).caches)
    own = mx.argmax(network(mx.array([text])), axis=-1)[:, 1:]
    is_right = mx.argmax(head.logits(states), axis=-1) == own
    assert abs(float(is_right.mean()) - right) < 0.08


def test_an_oracle_drafts_for_several_sessions_at_once() -> None:
    network = make_network("qwen3_5")
    head = OracleHead(network)
    texts = [PROMPT, PROMPT[::-1][:4], [8, 8, 1]]
    own = [pairs_of(head, network, text) for text in texts]
    counts = [tokens.shape[1] for tokens, _ in own]
    spans = [slice(end - n, end) for end, n in zip(accumulate(counts), counts, strict=True)]
    offsets = mx.array([i for n in counts for i in range(n)])
    batch = BatchLayer([SessionLayers(head).caches[0] for _ in texts], spans, offsets)
    tokens, hidden = (mx.concatenate([*parts], axis=1).swapaxes(0, 1) for parts in zip(*own, strict=True))
    drafted = mx.argmax(head.logits(head(tokens, hidden, [batch])), axis=-1)
    for span, text in zip(spans, texts, strict=True):
        assert [int(drafted[span.stop - 1, 0])] == greedy(network, text, 1)
