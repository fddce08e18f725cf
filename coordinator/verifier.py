"""A session's access to the target worker, which survives the worker's death."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from coordinator.prefix import CachedPrefix
from coordinator.round import Proposal, Verdict
from coordinator.worker_stream import WorkerError, WorkerFullError, WorkerLateError, WorkerLostError
from specd.errors import ResourceExhaustedError, UnavailableError
from specd.model_info import ModelInfo
from specd.sampling import Sampling
from specd.step_costs import StepCosts

log = structlog.get_logger()

# Between attempts on a worker that says it is healthy and still breaks the stream.
_RETRY_SECONDS = 0.05


class TargetStream(Protocol):
    """One session's stream to the target worker: target.proto in plain values."""

    async def verify(
        self, position: int, token_ids: Sequence[int], proposal: Proposal, timeout_seconds: float
    ) -> Verdict:
        """Run one round. Raises WorkerError."""

    def close(self) -> None:
        """End the stream, and with it the worker's cache."""


class TargetLink(Protocol):
    """The connection to the target worker that all sessions share."""

    @property
    def model(self) -> ModelInfo | None:
        """The target model while the worker is there with the one that the sessions are for, else None."""

    @property
    def fault(self) -> str:
        """Why there is no model, as a reason such as TARGET_UNAVAILABLE."""

    @property
    def refusal(self) -> str:
        """Why the worker that is there cannot be used, for people; empty if there is none."""

    @property
    def step_costs(self) -> StepCosts | None:
        """What steps of the target model cost, when it was last there."""

    @property
    def capacity_tokens(self) -> int:
        """How many tokens the worker's caches may hold, of all sessions together, when it was last there."""

    def open_stream(self, session_id: str, sampling: Sampling) -> TargetStream:
        """Open a stream for a session whose tokens are chosen like this."""

    async def wait_until_ready(self, timeout_seconds: float) -> bool:
        """Wait for the worker to be there; return whether it is."""


class Verifier:
    """Gets verdicts for one session from the target worker.

    When the worker is lost, the session's tokens are sent again, to a new stream, as soon as it is back: nothing is
    lost, because the coordinator has them all, and nothing is repeated, because only verdicts commit tokens. When it
    is late, they are sent again on the same stream.
    """

    def __init__(
        self,
        link: TargetLink,
        session_id: str,
        sampling: Sampling,
        *,
        timeout_seconds: float,
        recovery_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._link = link
        self._session_id = session_id
        self._sampling = sampling
        self._timeout_seconds = timeout_seconds
        self._recovery_seconds = recovery_seconds
        self._clock = clock
        self._stream: TargetStream | None = None
        self._cached = CachedPrefix()
        self._vocabulary_size = 0
        self.num_replays = 0
        self.reused_len: int | None = None  # of the session's first stream

    async def verify(self, token_ids: Sequence[int], proposal: Proposal) -> Verdict:
        """Return the target's verdict on a proposal to come after `token_ids`.

        Raises UnavailableError when the target is lost and not back in time, WorkerError for what it refuses.
        """
        lost_at: float | None = None
        while True:
            try:
                return await self._exchange(token_ids, proposal)
            except (WorkerLostError, WorkerLateError, WorkerFullError) as error:
                log.warning("no verdict from the target worker, trying again", reason=error.reason, error=str(error))
                now = self._clock()
                lost_at = now if lost_at is None else lost_at
                if isinstance(error, WorkerLateError):
                    # Still at work, perhaps: the next request takes over what this one has done.
                    self._cached = CachedPrefix()
                else:
                    self.close()
                    self.num_replays += isinstance(error, WorkerLostError)
                await self._wait_for_target(lost_at + self._recovery_seconds - now, error)

    def close(self) -> None:
        """Free what the target worker holds of this session."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._cached = CachedPrefix()

    async def _exchange(self, token_ids: Sequence[int], proposal: Proposal) -> Verdict:
        if self._stream is None:
            if self._link.model is None:
                raise WorkerLostError(self._link.fault, "the target worker is away")
            self._stream = self._link.open_stream(self._session_id, self._sampling)
            self._vocabulary_size = self._link.model.vocabulary_size
        position = self._cached.position(token_ids)
        verdict = await self._stream.verify(position, token_ids[position:], proposal, self._timeout_seconds)
        num_proposed, num_accepted = len(proposal.token_ids), verdict.num_accepted
        if num_accepted > num_proposed or verdict.next_token_id >= self._vocabulary_size:
            raise WorkerError(
                "TARGET_BROKEN",
                f"the target worker accepted {num_accepted} of {num_proposed} tokens and chose {verdict.next_token_id}",
            )
        if self._sampling.top_log_probabilities is not None and len(verdict.log_probabilities) != num_accepted + 1:
            raise WorkerError("TARGET_BROKEN", "the target worker did not send the log-probabilities of its tokens")
        self._cached.update(len(token_ids), proposal.token_ids, verdict.cached_len)
        if self.reused_len is None:
            self.reused_len = verdict.reused_len
        return verdict

    async def _wait_for_target(self, seconds_left: float, error: WorkerError) -> None:
        await asyncio.sleep(min(_RETRY_SECONDS, max(seconds_left, 0)))
        if seconds_left <= 0 and isinstance(error, WorkerFullError):
            raise ResourceExhaustedError(error.reason, str(error), retry_after_seconds=5.0)
        if seconds_left <= 0 or not await self._link.wait_until_ready(seconds_left):
            raise UnavailableError(
                "TARGET_UNAVAILABLE",
                f"no verdict from the target worker, also not {self._recovery_seconds:g} s after it was first missed: "
                f"{self._link.refusal or error}",
                retry_after_seconds=5.0,
            )
