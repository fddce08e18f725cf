"""A session's access to the draft worker, which never fails: without a draft there is no proposal."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import structlog

from coordinator.plan import Plan
from coordinator.prefix import CachedPrefix
from coordinator.round import Proposal
from coordinator.worker_stream import WorkerError, WorkerLateError
from specd.model_info import ModelInfo
from specd.sampling import Acceptance, Sampling
from specd.step_costs import StepCosts

log = structlog.get_logger()

_FIRST_BACKOFF_SECONDS = 0.25
_LONGEST_BACKOFF_SECONDS = 8.0


class DraftStream(Protocol):
    """One session's stream to the draft worker: draft.proto in plain values."""

    async def send(self, position: int, token_ids: Sequence[int], plan: Plan, timeout_seconds: float) -> None:
        """Send a request, which supersedes one that is not answered yet. Raises WorkerError."""

    async def receive(self, timeout_seconds: float) -> Proposal:
        """Wait for the answer to the last request. Raises WorkerError."""

    def take_ahead(self) -> tuple[Proposal, Proposal] | None:
        """Return the last proposal and what comes after it, the guess of the target's token first, once it is there."""

    def close(self) -> None:
        """End the stream, and with it the worker's cache."""


class DraftLink(Protocol):
    """The connection to the draft worker that all sessions share."""

    @property
    def step_costs(self) -> StepCosts | None:
        """What steps of the draft model cost, when it was last there."""

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

    step_costs: StepCosts | None = None
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
        self._path_start = 0  # the position of the last proposal's first token
        self._backoff_seconds = _FIRST_BACKOFF_SECONDS
        self._retry_at = float("-inf")
        self._last_fault = ""

    def start_prefill(self, token_ids: Sequence[int]) -> None:
        """Let the draft work on the prompt, without waiting for it."""
        if self._link.model is not None and len(token_ids) < self._link.model.context_length:
            self._prefilling = asyncio.ensure_future(self._prefill(token_ids))

    async def propose(self, token_ids: Sequence[int], plan: Plan) -> Proposal:
        """Return what the draft says comes after `token_ids`, as far as planned, or nothing and the reason.

        If the draft has gone ahead the right way, that is already there.
        """
        if plan.num_draft_tokens == 0:
            return Proposal([])
        model = self._link.model
        if model is None:
            self.close()
            return Proposal([], fault=self._link.fault)
        room = model.context_length - len(token_ids)
        if room <= 0:
            self.close()  # for good: a session only grows
            return Proposal([], fault="DRAFT_CONTEXT_EXCEEDED")
        plan = plan.within(room)
        if self._clock() < self._retry_at:
            return Proposal([], fault=self._last_fault)
        ready = self._take_ready(model, token_ids, plan.num_draft_tokens)
        try:
            if ready.token_ids:
                await self._go_on(token_ids, ready, plan)
            else:
                ready = await self._exchange(model, token_ids, plan)
        except WorkerError as error:
            fault = self._fail(error)
            return ready if ready.token_ids else Proposal([], fault=fault)
        return ready

    def close(self) -> None:
        """Free what the draft worker holds of this session."""
        if self._prefilling is not None:
            self._prefilling.cancel()
            self._prefilling = None
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._forget()

    def _forget(self) -> None:
        self._cached = CachedPrefix()

    def _take_ready(self, model: ModelInfo, token_ids: Sequence[int], most: int) -> Proposal:
        """Return what the draft has already proposed to come after these tokens, by going ahead the right way."""
        answers = self._stream.take_ahead() if self._stream is not None else None
        if answers is None or not all(self._is_sound(model, answer) for answer in answers):
            return Proposal([])
        proposal, ahead = answers
        path = [*proposal.token_ids, *ahead.token_ids]
        self._cached.update(self._path_start, path, ahead.cached_len)
        given = token_ids[self._path_start :]
        if path[: len(given)] != given:
            return Proposal([])
        span = slice(len(given), len(given) + most)
        return Proposal(
            path[span],
            [*proposal.distributions, *ahead.distributions][span],
            confidences=[*proposal.confidences, *ahead.confidences][span],
            was_ahead=True,
        )

    def _is_sound(self, model: ModelInfo, proposal: Proposal) -> bool:
        """Whether what the draft said can be used: the target worker would refuse the whole round for one bad id."""
        num_tokens = len(proposal.token_ids)
        return (
            num_tokens > 0
            and max(proposal.token_ids) < model.vocabulary_size
            and (self._sampling.acceptance is not Acceptance.REJECTION or len(proposal.distributions) == num_tokens)
            and len(proposal.confidences) in {0, num_tokens}
            and all(0 <= confidence <= 1 for confidence in proposal.confidences)
        )

    async def _go_on(self, token_ids: Sequence[int], ready: Proposal, plan: Plan) -> None:
        """Let the draft go ahead further, from a proposal that it has made already; its answer is not waited for.

        The worker may end the proposal earlier now, so that nothing after `token_ids` is sure to stay in its cache.
        """
        position = self._cached.position(token_ids)
        self._path_start = len(token_ids)
        self._cached.update(len(token_ids), [], len(token_ids))
        again = replace(plan, num_draft_tokens=len(ready.token_ids))
        await self._open_stream().send(position, token_ids[position:], again, self._timeout_seconds)

    async def _exchange(self, model: ModelInfo, token_ids: Sequence[int], plan: Plan) -> Proposal:
        if self._prefilling is not None:
            await self._prefilling  # two writes at once are one too many for gRPC
            self._prefilling = None
        stream = self._open_stream()
        position = self._cached.position(token_ids)
        await stream.send(position, token_ids[position:], plan, self._timeout_seconds)
        proposal = await stream.receive(self._timeout_seconds)
        num_proposed = len(proposal.token_ids)
        fewest = 1 if plan.min_confidences else plan.num_draft_tokens
        if not fewest <= num_proposed <= plan.num_draft_tokens or not self._is_sound(model, proposal):
            raise WorkerError(
                "DRAFT_BROKEN",
                f"the draft worker answered with {proposal.token_ids}, confidences {proposal.confidences} "
                f"and {len(proposal.distributions)} distributions",
            )
        self._cached.update(len(token_ids), proposal.token_ids, proposal.cached_len)
        self._path_start = len(token_ids)
        self._backoff_seconds = _FIRST_BACKOFF_SECONDS
        if self.reused_len is None:
            self.reused_len = proposal.reused_len
        return proposal

    async def _prefill(self, token_ids: Sequence[int]) -> None:
        # An error comes again, and is handled, when the first proposal is asked for on this stream.
        with contextlib.suppress(WorkerError):
            await self._open_stream().send(0, token_ids, Plan(0), self._timeout_seconds)

    def _open_stream(self) -> DraftStream:
        if self._stream is None:
            self._stream = self._link.open_stream(self._session_id, self._sampling)
            self._forget()
        return self._stream

    def _fail(self, error: WorkerError) -> str:
        # A late worker goes on with its prefill, so its stream stays; what its cache holds is not known.
        if isinstance(error, WorkerLateError):
            self._forget()
        else:
            self.close()
        self._last_fault = error.reason
        self._retry_at = self._clock() + self._backoff_seconds
        self._backoff_seconds = min(2 * self._backoff_seconds, _LONGEST_BACKOFF_SECONDS)
        log.warning(
            "no proposal from the draft worker, going on with the target alone", reason=error.reason, error=str(error)
        )
        return error.reason
