"""Sessions of a target with a head, without requests: to measure proposals, and to compute each kind of pass once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from specd.worker.engine.forward import BareCache, forward
from specd.worker.engine.jobs import Evaluate, Feed, Steps
from specd.worker.heads.head import Head, HeadCache
from specd.worker.layers.session_layers import SessionLayers

# The tokens that the target has emitted since the head has read: a draft token, and the target's own.
_NEW = 2


class HeadTrial:
    """A session of `num_tokens` tokens in the target's layers, which its head has read, but for the last ones."""

    def __init__(self, head: Head, num_tokens: int) -> None:
        """Feed the tokens to the target, lazily."""
        network = head.states.network
        self.layers = SessionLayers(network)
        self._tokens = [0] * num_tokens
        (rows,) = forward([Feed(BareCache(network, self.layers, batches=False), mx.array(self._tokens))])
        self._new = rows[-_NEW:]
        self._cache.saw(rows)

    @property
    def _cache(self) -> HeadCache:
        return cast("HeadCache", self.layers.companion)

    def read(self) -> Steps[None]:
        """Let the head read the target's hidden states, as a prefill does."""
        yield from self._cache.read([*self._tokens, 0], 0)
        yield Evaluate(self.layers.arrays)

    def first_logits(self, num_draft_tokens: int) -> Steps[mx.array]:
        """Return the logits [1, rows] of the first draft token."""
        position = max(self._cache.end - 1, 0)
        tokens = [*self._tokens[position:], 0]
        return self._cache.first_logits(self.layers, tokens, position, num_draft_tokens)

    def next_logits(self, latest: mx.array) -> Steps[mx.array]:
        """Return the logits [1, rows] of the draft token that follows the latest one [1]."""
        return self._cache.next_logits(latest)

    @property
    def most_draft_tokens(self) -> int:
        """The most tokens of a proposal."""
        return self._cache.most_draft_tokens

    def rewind(self) -> None:
        """Let the head forget the last tokens and the draft, and give it the hidden states of these tokens again."""
        self._cache.rewind(len(self._tokens) - len(self._new))
        self._cache.saw(self._new)


def propose(trials: Sequence[HeadTrial], num_draft_tokens: int) -> mx.array:
    """Propose tokens for several sessions, or as many as the head can, lazily, in the same passes."""
    num_draft_tokens = min(num_draft_tokens, *(trial.most_draft_tokens for trial in trials))
    jobs = [trial.first_logits(num_draft_tokens) for trial in trials]
    chosen: list[mx.array] = []
    for i in range(num_draft_tokens):
        latest = [mx.argmax(logits, axis=-1) for logits in _together(jobs)]
        chosen += latest
        if i + 1 < num_draft_tokens:
            jobs = [trial.next_logits(ids) for trial, ids in zip(trials, latest, strict=True)]
    return mx.concatenate(chosen)


def _together(jobs: Sequence[Steps[mx.array]]) -> list[mx.array]:
    """Run jobs that only feed, with the feeds of all of them in one pass; return their results."""
    answers: list[Any] = [None] * len(jobs)
    results: dict[int, mx.array] = {}
    while len(results) < len(jobs):
        feeds: dict[int, Any] = {}
        for i, job in enumerate(jobs):
            if i not in results:
                try:
                    feeds[i] = job.send(answers[i])
                except StopIteration as end:
                    results[i] = end.value
        for i, answer in zip(feeds, forward([*feeds.values()]) if feeds else (), strict=True):
            answers[i] = answer
    return [results[i] for i in range(len(jobs))]
