"""Trials of a head at load: whether the target gives it the right states, and whether it computes several sessions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from specd.worker.engine.forward import BareCache, agree, bare_cache, forward
from specd.worker.engine.jobs import Feed
from specd.worker.heads.head import Head
from specd.worker.heads.hidden import HiddenStates
from specd.worker.layers.session_layers import SessionLayers


def states_are_right(states: HiddenStates, network: Module, *, batches: bool) -> bool:
    """Return whether the output layer and a known cap map the hidden states to the network's logits.

    The passes are a whole one, a single token, and a batch of two sessions if the network `batches`. It is not so for
    a network that changes its logits behind the output layer in another way. Where the hidden states are
    inputs of layers, nothing maps them to logits: they must be the same in a whole pass and in parts of it.
    """
    if states.layers:
        return _are_same_in_parts(states, network, batches=batches)
    seen: list[tuple[mx.array, mx.array]] = []

    def watched(token_ids: mx.array, cache: Sequence[Any]) -> mx.array:
        seen.append(states.run(token_ids, cache))
        return seen[-1][0]

    try:
        watching: Any = watched
        caches = [BareCache(watching, bare_cache(network).layers, batches) for _ in range(2)]
        for tokens in ([[1, 2, 3, 4, 5]], [[6]], [[7, 8, 9], [10]]):
            mx.eval(forward([Feed(cache, mx.array(ids)) for cache, ids in zip(caches, tokens, strict=False)]))
        return all(agree(states.logits_of_target(hidden), logits) for logits, hidden in seen)
    except Exception:  # networks can raise any error on caches and offsets
        return False


def _are_same_in_parts(states: HiddenStates, network: Module, *, batches: bool) -> bool:
    def hidden(token_ids: mx.array, cache: Sequence[Any]) -> mx.array:
        return states.run(token_ids, cache)[1]

    watching: Any = hidden
    cache, other, fresh = (BareCache(watching, bare_cache(network).layers, batches) for _ in range(3))
    text = mx.array([1, 2, 3, 4, 5, 6, 7, 8])
    try:
        parts = [forward([Feed(cache, text[:5])])[0], forward([Feed(cache, text[5:6]), Feed(other, text[:2])])[0]]
        parts += [forward([Feed(cache, text[6:])])[0]]
        return agree(mx.concatenate(parts), forward([Feed(fresh, text)])[0])
    except Exception:  # networks can raise any error on caches and offsets
        return False


def computes_together(head: Head) -> bool:
    """Return whether a head gives two sessions the same logits in one pass as alone."""
    try:
        return agree(head_logits(head, batches=True), head_logits(head, batches=False))
    except Exception:  # layers can raise any error on offsets and masks of several sessions
        return False


def head_logits(head: Head, *, batches: bool) -> mx.array:
    """Return the logits that a head of pairs gives two sessions with random states, after two passes each."""
    states = mx.random.normal((8, head.size), key=mx.random.key(0)).astype(head.states.dtype)
    outputs: list[mx.array] = []
    caches = [BareCache(head, SessionLayers(head), batches) for _ in range(2)]
    for counts in ((5, 2), (1, 3)):
        feeds = [
            Feed(cache, mx.arange(n, dtype=mx.uint32), hidden=states[:n])
            for cache, n in zip(caches, counts, strict=True)
        ]
        outputs += [of_last for of_last, _ in forward(feeds)]
    return mx.concatenate(outputs)
