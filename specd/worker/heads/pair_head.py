"""A head that reads pairs of a hidden state of the target and the token that follows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from specd.cache_footprint import CacheFootprint
from specd.worker.engine.forward import batch_layers
from specd.worker.engine.jobs import Feed
from specd.worker.heads.head import Head
from specd.worker.heads.pairs import Pairs, footprint_of


class PairHead(Head):
    """A network over pairs of a hidden state h_s of the target and the token x_{s+1}.

    Its cache holds pair s in row s. Its output for that pair is a state for position s + 1, from which `logits` makes
    those of x_{s+2}. A chain of drafts continues with this state in the place of h_{s+1}, and with the token that was
    drafted. `layers` are its own layers, for `SessionLayers`.
    """

    def __call__(self, token_ids: mx.array, hidden: mx.array, cache: Sequence[Any]) -> mx.array:
        """Return the head's states [..., size] for pairs of token ids [...] and states [..., size].

        The pairs are [1, n] of one session, or [tokens, 1] of several, with a `BatchLayer` for each of its layers.
        """
        raise NotImplementedError

    def begin(self) -> Pairs:
        """Begin a session without tokens."""
        return Pairs(self)

    def measured_footprint(self) -> CacheFootprint:
        """Return the memory that a session keeps, without computation."""
        return footprint_of(self)

    def compute(self, feeds: Sequence[Feed]) -> list[tuple[mx.array, mx.array]]:
        """Feed pairs to each session; return the logits [1, rows] and the head's state [1, size] after its last one."""
        if len(feeds) > 1 and not feeds[0].cache.batches:
            return [outputs for feed in feeds for outputs in self.compute([feed])]
        if len(feeds) == 1:
            (feed,) = feeds
            assert feed.hidden is not None
            lasts = self(feed.token_ids[None], feed.hidden[None], feed.cache.layers.caches)[0, -1:]
        else:
            layers, spans = batch_layers(feeds)
            hidden = mx.concatenate([cast("mx.array", feed.hidden) for feed in feeds])
            states = self(mx.concatenate([feed.token_ids for feed in feeds])[:, None], hidden[:, None], layers)
            lasts = states[mx.array([span.stop - 1 for span in spans]), 0]
        for feed in feeds:
            feed.cache.layers.fed(feed.num_tokens)
        logits = self.logits(lasts)
        return [(logits[i : i + 1], lasts[i : i + 1]) for i in range(len(feeds))]
