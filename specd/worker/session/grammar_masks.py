"""Masks of the tokens that a session's grammar allows, made beside the engine's thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import mlx.core as mx
import numpy as np

from specd.grammar import SessionGrammar
from specd.matching.matcher import Mask, SessionMatcher, chosen_by_target
from specd.matching.vocabulary import GrammarVocabulary, compiling
from specd.text.tokenizer import Tokenizer
from specd.worker.model.loader import LoadedModel

# Waits for the masks of a request's places: an array [places, vocabulary size], true for tokens that the grammar
# allows, or None if it allows all. Raises what `SessionMatcher` raises.
Allowed = Callable[[], mx.array | None]
Rows = np.ndarray[tuple[int, int], np.dtype[np.bool_]]

# Sessions that compute masks at once. llguidance does not hold the interpreter's lock.
_THREADS = 4


class GrammarMasks:
    """The masks of all sessions of a worker."""

    def __init__(self, model: LoadedModel, observe: Callable[[float], None]) -> None:
        """`observe` is told how long the masks of each request took, in seconds, on any thread."""
        self._model = model
        self._observe = observe
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar-masks")

    def begin(self, grammar: SessionGrammar) -> SessionMasks:
        """Begin a session."""
        size = self._model.info.vocabulary_size
        return SessionMasks(self._threads, size, lambda: SessionMatcher(self._vocabulary, grammar), self._observe)

    @cached_property
    def _vocabulary(self) -> GrammarVocabulary:
        info = self._model.info
        tokenizer = Tokenizer(self._model.tokenizer_json)
        return GrammarVocabulary(tokenizer, size=info.vocabulary_size, eos_token_ids=info.eos_token_ids)


class SessionMasks:
    """The masks of one session, for one request after the other."""

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        vocabulary_size: int,
        make_matcher: Callable[[], SessionMatcher],
        observe: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._threads = threads
        self._vocabulary_size = vocabulary_size
        self._make_matcher = make_matcher
        self._observe = observe
        self._matcher: SessionMatcher | None = None
        self._latest: Future[Rows | None] | None = None

    def start(self, position: int, token_ids: Sequence[int], proposal: Sequence[int]) -> Allowed:
        """Begin to compute the masks of a proposal's places and of the one behind it."""
        before = self._latest
        # A pass waits for its masks, so no mask waits for a grammar that is compiled.
        threads = compiling if self._matcher is None else self._threads
        self._latest = future = threads.submit(self._masks, before, position, token_ids, proposal)

        def wait() -> mx.array | None:
            rows = future.result()
            return mx.array(rows) if rows is not None else None

        return wait

    async def done(self) -> None:
        """Wait for the masks of the latest request, or their error, without an effect."""
        if self._latest is not None:
            await asyncio.wait({asyncio.wrap_future(self._latest)})

    def _masks(
        self, before: Future[Rows | None] | None, position: int, token_ids: Sequence[int], proposal: Sequence[int]
    ) -> Rows | None:
        if before is not None:
            before.exception()  # of an earlier request: this one must not overtake it
        if self._matcher is None:
            self._matcher = self._make_matcher()
        started_at = time.perf_counter()
        with chosen_by_target():
            self._matcher.follow(token_ids, position)
        # The next request does not repeat the tokens that are accepted.
        rows = _rows(self._matcher.masks(proposal, follows=True), self._vocabulary_size)
        self._observe(time.perf_counter() - started_at)
        return rows


def _rows(masks: Sequence[Mask | None], size: int) -> Rows | None:
    if all(mask is None for mask in masks):
        return None
    everything = np.ones(size, np.bool_)
    rows = [
        everything if mask is None else np.unpackbits(mask, count=size, bitorder="little").view(np.bool_)
        for mask in masks
    ]
    return np.stack(rows)
