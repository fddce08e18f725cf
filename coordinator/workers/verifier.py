"""A session's access to the target worker, which survives the worker's death."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import structlog

from coordinator.core import Part, Plan, Proposal, SessionSetup, Verdict
from coordinator.workers.answers import check_self_proposal, check_verdict
from coordinator.workers.cached_prefix import CachedPrefix
from coordinator.workers.errors import WorkerError, WorkerFullError, WorkerLateError, WorkerLostError
from coordinator.workers.remote_worker import RemoteWorker, WorkerLife
from specd.errors import ResourceExhaustedError, UnavailableError
from specd.vocabulary import TokenSource

log = structlog.get_logger()

# The pause before a session is sent again doubles with each loss of the target in the same round. After the last of
# these losses the session fails, because a request that kills the target each time would also end the caches of others.
_FIRST_PAUSE_SECONDS = 0.05
_MOST_LOSSES = 5
_RETRY_SECONDS = 5.0
_NOTHING = Plan()


class TargetStream(Protocol):
    """One session's stream to the target worker: target.proto in plain values."""

    async def verify(
        self, position: int, token_ids: Sequence[int], proposal: Proposal, ahead: Plan, timeout_seconds: float
    ) -> Verdict:
        """Run one round, and ask for the draft tokens of the next one as planned ahead. Raises WorkerError."""

    async def proposal(self, timeout_seconds: float) -> Part:
        """Wait for the target's own draft tokens after the last verdict, if they were asked for. Raises WorkerError."""

    def close(self) -> None:
        """End the stream, and with it the worker's cache."""


class Verifier:
    """Gets verdicts for one session from the target worker.

    When the worker is lost, the session's tokens are sent again, to a new stream, as soon as it is back. No token is
    lost, because the coordinator has them all, and none is repeated, because only verdicts commit tokens. When the
    worker is late, the tokens are sent again on the same stream.
    """

    def __init__(
        self,
        worker: RemoteWorker[TargetStream],
        setup: SessionSetup,
        *,
        timeout_seconds: float,
        recovery_seconds: float,
        clock: Callable[[], float],
        asks_ahead: bool = False,
    ) -> None:
        """`asks_ahead` is whether the target proposes the session's draft tokens."""
        self._worker = worker
        self._asks_ahead = asks_ahead
        self._setup = setup
        self._timeout_seconds = timeout_seconds
        self._recovery_seconds = recovery_seconds
        self._clock = clock
        self._stream: TargetStream | None = None
        self._cached = CachedPrefix()
        self._vocabulary_size = 0
        self._life: WorkerLife | None = None  # the life of the target that chose the latest tokens
        self._stream_life: WorkerLife | None = None
        self._ahead = _NOTHING  # of the draft tokens that the target may propose after its last verdict

    async def verify(self, token_ids: Sequence[int], proposal: Proposal, ahead: Plan = _NOTHING) -> Verdict:
        """Return the target's verdict on a proposal after `token_ids`; a target that drafts begins with those `ahead`.

        Raises UnavailableError when the target is lost and not back in time, or lost too often in this round, or back
        with weights that may be others (TARGET_REPLACED),
        ResourceExhaustedError when it has no room in time, WorkerError when it refuses.
        """
        give_up_at = None
        num_losses = num_replays = 0
        while True:
            try:
                verdict = await self._exchange(token_ids, proposal, ahead)
                return replace(verdict, num_replays=num_replays, was_retried=give_up_at is not None)
            except (WorkerLostError, WorkerLateError, WorkerFullError) as error:
                log.warning("no verdict from the target worker, trying again", reason=error.reason, error=str(error))
                now = self._clock()
                give_up_at = now + self._recovery_seconds if give_up_at is None else give_up_at
                if isinstance(error, WorkerLateError):
                    # It may still compute: the next request reuses the tokens that are in its cache by then.
                    self._cached = CachedPrefix()
                else:
                    num_losses += self._stream is not None and isinstance(error, WorkerLostError)
                    self.close()
                    num_replays += isinstance(error, WorkerLostError)
                seconds_left = give_up_at - now if num_losses < _MOST_LOSSES else 0.0
                pause = _FIRST_PAUSE_SECONDS * 2 ** max(num_losses - 1, 0)
                await self._wait_for_target(pause, seconds_left, error)

    def close(self) -> None:
        """Free the session's cache in the target worker."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._cached = CachedPrefix()

    async def proposal(self, timeout_seconds: float) -> Part:
        """Return the target's proposal after its last verdict; if it is late or lost, a part with a fault."""
        if self._stream is None:
            return Part(TokenSource.DRAFT, from_target=True)
        try:
            part = await self._stream.proposal(timeout_seconds)
            check_self_proposal(part, self._ahead, vocabulary_size=self._vocabulary_size)
        except WorkerError as error:
            # Where the target is lost, the next verdict waits for it.
            log.warning("no proposal from the target worker", reason=error.reason, error=str(error))
            return Part(TokenSource.DRAFT, from_target=True, fault=error.reason)
        return part

    async def _exchange(self, token_ids: Sequence[int], proposal: Proposal, ahead: Plan) -> Verdict:
        if self._stream is None:
            if self._worker.model is None:
                raise WorkerLostError(self._worker.fault, "the target worker is away")
            if self._life is not None and not self._worker.life.continues(self._life):
                raise UnavailableError(
                    "TARGET_REPLACED",
                    "the target worker was lost before its weights were known, and the session cannot continue with "
                    "others: send the request again",
                    retry_after_seconds=_RETRY_SECONDS,
                )
            self._stream_life = self._worker.life
            self._stream = self._worker.open_stream(self._setup)
            self._vocabulary_size = self._worker.model.vocabulary_size
        position = self._cached.position(token_ids)
        self._ahead = ahead if self._asks_ahead else _NOTHING
        if self._asks_ahead and self._worker.self_draft is None:  # the target has come back without a draft
            self._ahead, proposal = _NOTHING, proposal.as_guesses()
        stream, seconds = self._stream, self._timeout_seconds
        verdict = await stream.verify(position, token_ids[position:], proposal, self._ahead, seconds)
        check_verdict(
            verdict,
            proposal.token_ids,
            self._setup,
            session_len=len(token_ids),
            vocabulary_size=self._vocabulary_size,
            is_first=position == 0,
        )
        self._life = self._stream_life
        self._cached.update(len(token_ids), proposal.token_ids, verdict.cached_len)
        return verdict

    async def _wait_for_target(self, pause: float, seconds_left: float, error: WorkerError) -> None:
        await asyncio.sleep(min(pause, max(seconds_left, 0)))
        if seconds_left > 0 and await self._worker.wait_until_ready(seconds_left):
            return
        if isinstance(error, WorkerFullError):
            raise ResourceExhaustedError(error.reason, str(error), retry_after_seconds=_RETRY_SECONDS)
        raise UnavailableError(
            "TARGET_UNAVAILABLE",
            f"no verdict from the target worker within {self._recovery_seconds:g} s or {_MOST_LOSSES} losses: "
            f"{self._worker.fault or error.reason}",  # the log has the words, with addresses and names of files
            retry_after_seconds=_RETRY_SECONDS,
        )
