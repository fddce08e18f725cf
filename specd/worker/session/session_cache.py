"""The KV cache of one session."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import mlx.core as mx

from specd.errors import CacheTooShortError, SpecdError
from specd.worker.engine.jobs import Encode, Evaluate, Feed, Result, Steps
from specd.worker.engine.prefill_chunk import PrefillChunk
from specd.worker.heads.head import HeadCache
from specd.worker.layers.session_layers import SessionLayers
from specd.worker.model.loader import LoadedModel
from specd.worker.sampling.sampler import checksum, is_finite
from specd.worker.session.prefix_cache import PrefixCache, common_prefix_len

# Pending tokens that a forward pass with logits may include without needing their logits. One more pass would cost a
# whole decode step, and the unused logits of these rows cost little.
MAX_PENDING = 32


class SessionCache:
    """The KV cache of a prefix of the session's tokens, and the tokens in it.

    Invariant: the layers hold `token_ids`, followed by the `num_fed - cached_len` tokens that were fed and not yet
    committed (a draft feeds tokens before Python knows them, and can be stopped in between). `known_len` is the number
    of tokens that certainly belong to the session: those of the last request, and in the target also those accepted
    since. The tokens behind them in the cache were only proposed. `source` is for an encoder to read before the first
    token. `adapter` is the name of the adapter of the model that computes the session, "" for none. The session may
    share cached prefixes with sessions of the same `adapter` that have the same `namespace`. `reused_len` is the
    number of tokens, with those of the source, that came from the prefix cache when the session began. The arrays
    belong to the engine's thread, so only jobs may call the methods.
    """

    def __init__(self, model: LoadedModel, prefixes: PrefixCache | None = None) -> None:
        """Begin empty. The first tokens can come from `prefixes`, where `keep` leaves the layers."""
        self._model = model
        self._vocabulary_size = model.info.vocabulary_size
        self._prefixes = prefixes
        self._use(model, adapter="")
        self.source: tuple[int, ...] = ()
        self.namespace = b""
        self._reading: Iterator[Sequence[mx.array]] | None = None  # of a source; the next request continues it
        self.token_ids: list[int] = []
        self.known_len = 0
        self.reused_len = 0
        self._ahead: list[Any] = []
        self._expected: int | None = None

    def choose(self, adapter: str) -> None:
        """Compute with an adapter of the model, by its name, from the first token on."""
        assert not self.num_fed
        self._use(self._model.adapters[adapter], adapter)

    def _use(self, model: LoadedModel, adapter: str) -> None:
        self.network = model.network
        self.batches = model.batches
        self.static = model.static
        self.sharing = model.sharing
        self.adapter = adapter
        self.layers = SessionLayers(model.network)

    @property
    def num_ahead(self) -> int:
        """The number of tokens that were fed behind the committed ones, each the choice after the one before it."""
        return len(self._ahead)

    @property
    def last_ahead(self) -> Any:
        """The outcome of the last of them, None without any."""
        return self._ahead[-1] if self._ahead else None

    def run_ahead(self, choice: mx.array) -> Steps[mx.array]:
        """Feed a token [1] behind the committed ones, lazily, and return the logits [1, vocabulary_size] after it."""
        assert self.num_fed == self.cached_len + self.num_ahead
        return self.feed(choice)

    def ran_ahead(self, outcome: Any) -> None:
        """Note what came of a token that was fed ahead."""
        self._ahead.append(outcome)

    def expect(self, token_id: int) -> None:
        """Set the token that follows the committed ones: the first that was fed ahead, or will be."""
        self._expected = token_id

    def fed_ahead(self, position: int, token_ids: Sequence[int]) -> Any:
        """Return what came of feeding exactly these tokens, if that was done ahead; None otherwise."""
        self._free_if_lost()
        if not self._ahead or position != self.cached_len or [self._expected] != [*token_ids]:
            return None
        self.known_len = position + 1
        return self._ahead[0]

    @property
    def head_cache(self) -> HeadCache | None:
        """The cache of the network's head, if it has one."""
        return cast("HeadCache | None", self.layers.companion)

    @property
    def cached_len(self) -> int:
        """The number of the session's tokens in the cache."""
        return len(self.token_ids)

    @property
    def num_fed(self) -> int:
        """The number of tokens in the layers, committed or not."""
        return self.layers.num_fed

    def feed(self, token_ids: mx.array) -> Steps[mx.array]:
        """Append tokens [n], lazily, and return the logits [n, vocabulary_size] after each of them. One step.

        Raises CacheTooShortError when the layers have lost their tokens with a failed pass of other sessions.
        """
        logits = yield from self._feed(token_ids)
        return logits[:, : self._vocabulary_size]

    def _feed(self, token_ids: mx.array, *, wants_logits: bool = True) -> Steps[mx.array]:
        num_fed = self.num_fed + token_ids.size
        rows: mx.array = yield Feed(self, token_ids, wants_logits)
        if self.num_fed != num_fed:
            raise CacheTooShortError(self.cached_len, 0)
        if self.head_cache is not None:
            self.head_cache.saw(rows)
        return rows

    def commit(self, token_ids: Sequence[int]) -> None:
        """Set the tokens that were fed."""
        self.token_ids.extend(token_ids)
        del self._ahead[: len(token_ids)]
        assert self.cached_len <= self.num_fed

    def prefill(
        self,
        position: int,
        token_ids: Sequence[int],
        chunk: PrefillChunk,
        read: Callable[[mx.array, Sequence[int]], Steps[None]] | None = None,
    ) -> Steps[list[int]]:
        """Hold the first `position` tokens of the cache, then append `token_ids`, all but the last few.

        Returns the last few, at least one, for the caller to feed, who needs the logits there. Tokens that are cached
        already, from a request that was stopped or repeated or from an ended session with the same beginning, are not
        computed again. Each step computes a chunk of the tokens, or a part of the encoder.
        With `read`, all tokens are computed, in chunks of a round's length, and `read` gets the logits
        [n, vocabulary_size] after each chunk's tokens, and the tokens [n] that follow them.

        Raises CacheTooShortError when the cache holds fewer than `position` tokens.
        """
        self._free_if_lost()
        if position > self.cached_len:
            raise CacheTooShortError(position, self.cached_len)
        self.known_len = position + len(token_ids)
        if not self.token_ids and not self.layers.source and read is None:
            self._take_over(token_ids[:-1])
        while self.layers.source != self.source:
            self._reading = self._reading or self.layers.read(self.source)
            yield Evaluate((yield Encode(len(self.source), partial(next, self._reading))))
        reused = common_prefix_len(self.token_ids[position:], token_ids[:-1]) if read is None else 0
        pending = [*self._rewind(position + reused), *token_ids[reused:]]
        while len(pending) > MAX_PENDING:
            if read is not None:
                fed = pending[:MAX_PENDING]
                logits = yield from self.feed(mx.array(fed))
                yield from read(logits, pending[1 : len(fed) + 1])
            else:
                fed = pending[: min(chunk.num_tokens, len(pending) - 1)]
                yield from self._feed(mx.array(fed), wants_logits=False)
                if self.head_cache is not None:
                    yield from self.head_cache.read(pending[: len(fed) + 1], self.cached_len)
                # The logits stay lazy, and are never computed.
                yield Evaluate(self.layers.arrays)
            self.commit(fed)
            del pending[: len(fed)]
        return pending

    def keep(self) -> None:
        """End, and leave the layers to the prefix cache, without tokens that were only proposed.

        Proposed tokens differ between sessions with the same text, and would make an entry for each. Layers that cannot
        be rewound that far keep them, because they would lose more valuable tokens too.
        """
        self._free_if_lost()
        if self._prefixes is not None:
            known_len = min(self.known_len, self.cached_len)
            self._rewind(known_len if self.layers.can_serve(known_len) == known_len else self.cached_len)
            if (self.token_ids or self.layers.source) and self._is_finite():
                self._prefixes.store(self.token_ids, self.layers, self.namespace, self.adapter)
        self.free()

    def free(self) -> None:
        """Free the memory."""
        # New layers, because the prefix cache may own the old ones now.
        self.layers = SessionLayers(self.network)
        self._reading, self._ahead = None, []
        self.token_ids = []

    def _free_if_lost(self) -> None:
        """Free the memory if the layers have lost their tokens with a failed pass of sessions that share their rows."""
        if self.num_fed < self.cached_len:
            self.free()

    def _is_finite(self) -> bool:
        """Return whether the last layer, which NaN of earlier ones reaches, holds none; a prefill has no logits."""
        return all(is_finite(checksum(rows)) for rows in self.layers.last_rows)

    def _take_over(self, token_ids: Sequence[int]) -> None:
        if self._prefixes is None:
            return
        layers = self._prefixes.take(token_ids, self.source, self.namespace, self.adapter)
        if layers is not None:
            self.layers, self._reading = layers, None
            self.token_ids = list(token_ids[: layers.num_fed])
            self.reused_len = len(self.source) + layers.num_fed

    def _rewind(self, cached_len: int) -> list[int]:
        """Forget the tokens from `cached_len` on; return the earlier tokens that the layers had to forget too."""
        self._ahead = []
        reached = self.layers.rewind(cached_len)
        lost = self.token_ids[reached:cached_len]
        del self.token_ids[reached:]
        return lost


def free_on_error(cache: SessionCache, steps: Steps[Result]) -> Steps[Result]:
    """Run a job. If it fails, free its cache, which may hold anything and must be neither used nor kept.

    The same holds for the sessions that share rows with it, unless the request itself was wrong. The stream cannot do
    this, because it does not learn the error of a job that was superseded or cancelled.
    """
    try:
        return (yield from steps)
    except Exception as error:
        if cache.layers.shared is not None and not isinstance(error, SpecdError):
            cache.layers.shared.lose()
        cache.free()
        raise
