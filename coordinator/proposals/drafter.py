"""The draft model as a source of draft tokens, which never fails: without a draft, its part is empty."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import structlog

from coordinator.core import Part, Plan, SessionSetup
from coordinator.proposals.drafts import Drafts
from coordinator.proposals.source import Source
from coordinator.workers.answers import check_proposal
from coordinator.workers.cached_prefix import CachedPrefix
from coordinator.workers.errors import WorkerError, WorkerLateError
from coordinator.workers.remote_worker import RemoteWorker
from specd.model_info import ModelInfo
from specd.vocabulary import TokenSource

log = structlog.get_logger()

_FIRST_BACKOFF_SECONDS = 0.25
_LONGEST_BACKOFF_SECONDS = 8.0
_MOST_LATE = 3  # answers in a row, after which a worker counts as hanging


class DraftStream(Protocol):
    """One session's stream to the draft worker: draft.proto in plain values. Calls raise WorkerError."""

    async def ask(self, position: int, token_ids: Sequence[int], plan: Plan, timeout_seconds: float) -> None:
        """Send a request, which supersedes an unanswered one."""

    async def answer(self, timeout_seconds: float) -> Part:
        """Wait for the answer to the last request."""

    def close(self) -> None:
        """End the stream, and with it the worker's cache."""


class Drafter(Source):
    """Gets proposals for one session from a draft worker, while there is one.

    A draft that is lost, late or wrong costs a session only speed: `propose` then returns an empty part with the
    reason. The next round asks another draft, or if all have failed, the same one after a pause that doubles each time.
    """

    def __init__(
        self,
        drafts: Callable[[], Drafts[DraftStream]],
        setup: SessionSetup,
        *,
        timeout_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        """`drafts` returns those that may propose now; a session leaves its worker when they are others."""
        self._choose = drafts
        self._setup = setup
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._stream: DraftStream | None = None
        self._prefilling: asyncio.Future[None] | None = None
        self._cached = CachedPrefix()
        self._begin_with(drafts())

    def _begin_with(self, drafts: Drafts[DraftStream]) -> None:
        self._drafts = drafts
        self._worker = drafts.best()
        self._backoff_seconds = _FIRST_BACKOFF_SECONDS
        self._retry_at = float("-inf")
        self._last_fault = ""
        self._failed: set[RemoteWorker[DraftStream]] = set()  # the workers that have failed since the last proposal
        self._num_late = 0

    def start_prefill(self, token_ids: Sequence[int]) -> None:
        """Start the draft's prefill, without waiting for it."""
        if self._worker.model is not None and len(token_ids) < self._worker.model.context_length:
            self._prefilling = asyncio.ensure_future(self._prefill(token_ids))

    async def propose(self, token_ids: Sequence[int], before: Sequence[int], plan: Plan) -> Part | None:
        """Return the draft's tokens after `token_ids`, as planned, or an empty part with the reason."""
        assert not before, "the draft model proposes first"
        if plan.limit(TokenSource.DRAFT) == 0:
            return None
        if (drafts := self._choose()) is not self._drafts:
            self.close()
            self._begin_with(drafts)
        if self._worker.model is None:
            self._leave()
        model = self._worker.model
        if model is None:
            return _fault(self._worker.fault)
        room = model.context_length - len(token_ids)
        if room <= 0:
            self.close()  # for ever, because a session only grows
            return _fault("DRAFT_CONTEXT_EXCEEDED")
        if self._clock() < self._retry_at:
            return _fault(self._last_fault)
        try:
            return await self._exchange(model, token_ids, plan.within(room))
        except WorkerError as error:
            return _fault(self._fail(error))

    def close(self) -> None:
        """Free the session's cache in the draft worker."""
        if self._prefilling is not None:
            self._prefilling.cancel()
            self._prefilling = None
        if self._stream is not None:
            self._stream.close()
            self._stream = None
            self._drafts.count(self._worker, -1)
        self._cached = CachedPrefix()

    def _leave(self) -> None:
        """Choose another worker for the next proposal, if there is one."""
        self.close()
        self._worker = self._drafts.best(apart_from=self._failed | {self._worker})

    async def _exchange(self, model: ModelInfo, token_ids: Sequence[int], plan: Plan) -> Part:
        give_up_at = self._clock() + self._timeout_seconds
        if self._prefilling is not None:
            await self._prefilling  # gRPC accepts one write at a time
            self._prefilling = None
        stream = self._open_stream()
        position = self._cached.position(token_ids)
        await stream.ask(position, token_ids[position:], plan, max(give_up_at - self._clock(), 0.0))
        part = await stream.answer(max(give_up_at - self._clock(), 0.0))
        vocabulary_size = self._setup.sampling.vocabulary_size or model.vocabulary_size  # the target's
        check_proposal(part, plan, self._setup, session_len=len(token_ids), vocabulary_size=vocabulary_size)
        self._cached.update(len(token_ids), part.token_ids, part.cached_len)
        self._drafts.observe(self._worker, part.exchange.wire_seconds)
        self._failed.clear()
        self._num_late = 0
        self._backoff_seconds = _FIRST_BACKOFF_SECONDS
        return part

    async def _prefill(self, token_ids: Sequence[int]) -> None:
        # The first proposal on this stream meets the same error, and handles it.
        with contextlib.suppress(WorkerError):
            await self._open_stream().ask(0, token_ids, Plan(), self._timeout_seconds)

    def _open_stream(self) -> DraftStream:
        if self._stream is None:
            # A draft without the adapter proposes as for the target alone: that costs acceptance, and changes no token.
            model, setup = self._worker.model, self._setup
            if model is None or model.adapter(setup.adapter) is None:
                setup = replace(setup, adapter="")
            self._stream = self._worker.open_stream(setup)
            self._drafts.count(self._worker, 1)
            self._cached = CachedPrefix()
        return self._stream

    def _fail(self, error: WorkerError) -> str:
        """Choose another worker that has not failed since the last proposal; or else the same one, after a pause."""
        is_late = isinstance(error, WorkerLateError)
        self._drafts.observe(self._worker, self._timeout_seconds)
        self._failed.add(self._worker)
        self._last_fault = error.reason
        log.warning("no proposal, decoding with the target alone", reason=error.reason, error=str(error))
        if self._drafts.has_others(self._failed):
            self._leave()
            return error.reason
        self._num_late = self._num_late + 1 if is_late else 0
        if is_late and self._num_late < _MOST_LATE:
            # A late worker continues its prefill, so its stream stays; its cache may hold anything.
            self._cached = CachedPrefix()
        else:  # the others have their turn again
            self.close()
            self._failed = {self._worker}
            self._num_late = 0
        self._retry_at = self._clock() + self._backoff_seconds
        self._backoff_seconds = min(2 * self._backoff_seconds, _LONGEST_BACKOFF_SECONDS)
        return error.reason


def _fault(reason: str) -> Part:
    return Part(TokenSource.DRAFT, fault=reason)
