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


class Route(Protocol):
    """A session's way to a target worker."""

    @property
    def worker(self) -> RemoteWorker[TargetStream]:
        """The session's present target."""
        ...

    def can_leave(self, life: WorkerLife | None) -> bool:
        """Return whether another target can continue the session after tokens of a target's life."""

    async def leave(self, life: WorkerLife | None, timeout_seconds: float) -> bool:
        """Wait for the session's turn at another target; return whether it came."""

    def began(self, verdict: Verdict) -> None:
        """Note the first verdict of the session's present target."""

    async def wait_until_ready(self, life: WorkerLife | None, timeout_seconds: float) -> bool:
        """Wait until the session's target is ready, or another one that can continue it; return whether one is."""


class Verifier:
    """Gets verdicts for one session from a target worker.

    When the worker is lost, the session's tokens are sent again, to a new stream, at once if there is another target,
    or as soon as the worker is back. No token is lost, because the coordinator has them all, and none is repeated,
    because only verdicts commit tokens. A session leaves a worker that stops before its next round. When the worker is
    late and there is no other, the tokens are sent again on the same stream.
    """

    def __init__(
        self,
        route: Route,
        setup: SessionSetup,
        *,
        timeout_seconds: float,
        recovery_seconds: float,
        clock: Callable[[], float],
        asks_ahead: bool = False,
    ) -> None:
        """`asks_ahead` is whether the target proposes the session's draft tokens."""
        self._route = route
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
        leaves = False  # a target that is there
        while True:
            if (leaves or self._route.worker.model is None) and self._route.can_leave(self._life):
                num_replays += self._stream is not None
                await self._leave(self._recovery_seconds if give_up_at is None else give_up_at - self._clock())
            try:
                verdict = await self._exchange(token_ids, proposal, ahead)
                return replace(verdict, num_replays=num_replays, was_retried=give_up_at is not None or num_replays > 0)
            except (WorkerLostError, WorkerLateError, WorkerFullError) as error:
                log.warning("no verdict from the target worker, trying again", reason=error.reason, error=str(error))
                leaves = not isinstance(error, WorkerLostError)
                now = self._clock()
                give_up_at = now + self._recovery_seconds if give_up_at is None else give_up_at
                if isinstance(error, WorkerLateError) and not self._route.can_leave(self._life):
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
            worker = self._route.worker
            if worker.model is None:
                raise WorkerLostError(worker.fault, "the target worker is away")
            if self._life is not None and not worker.life.continues(self._life):
                raise UnavailableError(
                    "TARGET_REPLACED",
                    "the target worker was lost before its weights were known, and the session cannot continue with "
                    "others: send the request again",
                    retry_after_seconds=_RETRY_SECONDS,
                )
            self._stream_life = worker.life
            self._stream = worker.open_stream(self._setup)
            self._vocabulary_size = worker.model.vocabulary_size
        position = self._cached.position(token_ids)
        self._ahead = ahead if self._asks_ahead else _NOTHING
        if self._asks_ahead and self._route.worker.self_draft is None:  # this target has no draft
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
        if position == 0:
            self._route.began(verdict)
        self._life = self._stream_life
        self._cached.update(len(token_ids), proposal.token_ids, verdict.cached_len)
        return verdict

    async def _wait_for_target(self, pause: float, seconds_left: float, error: WorkerError) -> None:
        await asyncio.sleep(min(pause, max(seconds_left, 0)))
        if seconds_left > 0 and await self._route.wait_until_ready(self._life, seconds_left):
            return
        if isinstance(error, WorkerFullError):
            raise ResourceExhaustedError(error.reason, str(error), retry_after_seconds=_RETRY_SECONDS)
        raise self._unavailable(self._route.worker.fault or error.reason)

    async def _leave(self, seconds_left: float) -> None:
        self.close()
        if not await self._route.leave(self._life, max(seconds_left, 0.0)):
            raise self._unavailable("no other target")

    def _unavailable(self, why: str) -> UnavailableError:
        return UnavailableError(
            "TARGET_UNAVAILABLE",
            f"no verdict from the target worker within {self._recovery_seconds:g} s or {_MOST_LOSSES} losses: {why}",
            retry_after_seconds=_RETRY_SECONDS,  # the log has the words, with addresses and names of files
        )
