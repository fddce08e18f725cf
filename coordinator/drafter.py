"""A session's access to the draft worker, which never fails: without a draft there is no proposal."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from coordinator.prefix import CachedPrefix
from coordinator.round import Proposal
from coordinator.worker_stream import WorkerError, WorkerLateError
from specd.model_info import ModelInfo
from specd.sampling import Acceptance, Sampling

log = structlog.get_logger()

_FIRST_BACKOFF_SECONDS = 0.25
_LONGEST_BACKOFF_SECONDS = 8.0


class DraftStream(Protocol):
    """One session's stream to the draft worker: draft.proto in plain values."""

    async def send(
        self, position: int, token_ids: Sequence[int], num_draft_tokens: int, timeout_seconds: float
    ) -> None:
        """Send a request, which supersedes one that is not answered yet. Raises WorkerError."""

    async def receive(self, timeout_seconds: float) -> Proposal:
        """Wait for the answer to the last request. Raises WorkerError."""

    def close(self) -> None:
        """End the stream, and with it the worker's cache."""


class DraftLink(Protocol):
    """The connection to the draft worker that all sessions share."""

    @property
    def model(self) -> ModelInfo | None:
        """The draft model while the worker is there and fits the target, else None."""

    @property
    def fault(self) -> str:
        """Why there is no model, as a reason such as DRAFT_UNAVAILABLE."""

    def open_stream(self, session_id: str, sampling: Sampling) -> DraftStream:
        """Open a stream for a session whose tokens are chosen like this."""


class NoDraft:
    """The link of a coordinator that has no draft worker."""

    model: ModelInfo | None = None
    fault = "DRAFT_NOT_CONFIGURED"

    def open_stream(self, session_id: str, sampling: Sampling) -> DraftStream:
        """Never called: there is no model."""
        raise AssertionError(session_id)


class Drafter:
    """Gets proposals for one session from the draft worker, as long as there is one.

    A draft that is lost, late or wrong costs a session speed and nothing else: `propose` then returns an empty
    proposal with the reason, and tries again after a while, longer each time.
    """

    def __init__(
        self,
        link: DraftLink,
        session_id: str,
        sampling: Sampling,
        *,
        timeout_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._link = link
        self._session_id = session_id
        self._sampling = sampling
        self.reused_len: int | None = None  # of the session's first stream
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._stream: DraftStream | None = None
        self._prefilling: asyncio.Future[None] | None = None
        self._cached = CachedPrefix()
        self._backoff_seconds = _FIRST_BACKOFF_SECONDS
        self._retry_at = float("-inf")
        self._last_fault = ""

    def start_prefill(self, token_ids: Sequence[int]) -> None:
        """Let the draft work on the prompt, without waiting for it."""
        if self._link.model is not None and len(token_ids) < self._link.model.context_length:
            self._prefilling = asyncio.ensure_future(self._prefill(token_ids))

    async def propose(self, token_ids: Sequence[int], num_draft_tokens: int) -> Proposal:
        """Return what the draft says comes after `token_ids`: `num_draft_tokens` tokens, or none and the reason."""
        if num_draft_tokens == 0:
            return Proposal([])
        model = self._link.model
        if model is None:
            self.close()
            return Proposal([], fault=self._link.fault)
        num_draft_tokens = min(num_draft_tokens, model.context_length - len(token_ids))
        if num_draft_tokens <= 0:
            self.close()  # for good: a session only grows
            return Proposal([], fault="DRAFT_CONTEXT_EXCEEDED")
        if self._clock() < self._retry_at:
            return Proposal([], fault=self._last_fault)
        try:
            return await self._exchange(model, token_ids, num_draft_tokens)
        except WorkerError as error:
            return Proposal([], fault=self._fail(error))

    def close(self) -> None:
        """Free what the draft worker holds of this session."""
        if self._prefilling is not None:
            self._prefilling.cancel()
            self._prefilling = None
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._cached = CachedPrefix()

    async def _exchange(self, model: ModelInfo, token_ids: Sequence[int], num_draft_tokens: int) -> Proposal:
        if self._prefilling is not None:
            await self._prefilling  # two writes at once are one too many for gRPC
            self._prefilling = None
        stream = self._open_stream()
        position = self._cached.position(token_ids)
        await stream.send(position, token_ids[position:], num_draft_tokens, self._timeout_seconds)
        proposal = await stream.receive(self._timeout_seconds)
        # The target worker would refuse the whole round for one bad id.
        if len(proposal.token_ids) != num_draft_tokens or max(proposal.token_ids) >= model.vocabulary_size:
            raise WorkerError("DRAFT_BROKEN", f"the draft worker answered with {proposal.token_ids}")
        if self._sampling.acceptance is Acceptance.REJECTION and len(proposal.distributions) != num_draft_tokens:
            raise WorkerError("DRAFT_BROKEN", f"the draft worker sent {len(proposal.distributions)} distributions")
        self._cached.update(len(token_ids), proposal.token_ids, proposal.cached_len)
        self._backoff_seconds = _FIRST_BACKOFF_SECONDS
        if self.reused_len is None:
            self.reused_len = proposal.reused_len
        return proposal

    async def _prefill(self, token_ids: Sequence[int]) -> None:
        # An error comes again, and is handled, when the first proposal is asked for on this stream.
        with contextlib.suppress(WorkerError):
            await self._open_stream().send(0, token_ids, 0, self._timeout_seconds)

    def _open_stream(self) -> DraftStream:
        if self._stream is None:
            self._stream = self._link.open_stream(self._session_id, self._sampling)
            self._cached = CachedPrefix()
        return self._stream

    def _fail(self, error: WorkerError) -> str:
        # A late worker goes on with its prefill, so its stream stays; what its cache holds is not known.
        if isinstance(error, WorkerLateError):
            self._cached = CachedPrefix()
        else:
            self.close()
        self._last_fault = error.reason
        self._retry_at = self._clock() + self._backoff_seconds
        self._backoff_seconds = min(2 * self._backoff_seconds, _LONGEST_BACKOFF_SECONDS)
        log.warning(
            "no proposal from the draft worker, going on with the target alone", reason=error.reason, error=str(error)
        )
        return error.reason
