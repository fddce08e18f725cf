"""The coordinator: takes requests, keeps their sessions, and drives their rounds."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import structlog

from coordinator.admission import Admission, Place
from coordinator.decoding import decode
from coordinator.drafter import Drafter, DraftLink
from coordinator.metrics import CoordinatorMetrics
from coordinator.output import EmittedToken, Output
from coordinator.prompt import encode_prompt
from coordinator.request import GenerationRequest, check_num_draft_tokens, check_prompt, resolve_max_tokens
from coordinator.round import Round
from coordinator.run_ahead import run_ahead
from coordinator.session import FinishReason, Session, SessionState
from coordinator.session_store import SessionStore
from coordinator.speculation import Speculation
from coordinator.statistics import SessionStatistics
from coordinator.tokenizer import Tokenizer
from coordinator.verifier import TargetLink, Verifier
from coordinator.worker_stream import WorkerError
from specd.errors import InternalError
from specd.model_info import ModelInfo
from specd.sampling import Sampling
from specd.settings import CoordinatorSettings

if TYPE_CHECKING:
    from coordinator.tracing import SessionTrace, Tracing  # OpenTelemetry need not be there

log = structlog.get_logger()

# Rounds that a session may be ahead of what its client has read.
_ROUNDS_AHEAD = 64


@dataclass(frozen=True)
class Emission:
    """What one round gives the client; the last one has a finish reason, and the stop string if that was it."""

    session_id: str
    seed: int
    tokens: list[EmittedToken]
    round: Round
    statistics: SessionStatistics
    stop_string: str | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why this is the last one, if it is."""
        # Not the session's own: its rounds are ahead of this one.
        return self.round.commit.finish_reason


class Coordinator:
    """Generates text with one target and, while it is there, one draft."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        metrics: CoordinatorMetrics,
        *,
        model: ModelInfo,
        tokenizer: Tokenizer,
        target: TargetLink,
        draft: DraftLink,
        tracing: Tracing | None = None,
    ) -> None:
        """Use a target link whose model and tokenizer are these; without `tracing` there are no spans."""
        self.settings = settings
        self.model = model
        self.draft = draft
        self.sessions = SessionStore(settings.session_idle_seconds, settings.session_budget_tokens, time.time)
        self.admission = Admission(
            max_sessions=settings.max_sessions,
            max_queued=settings.max_queued,
            capacity_tokens=lambda: target.capacity_tokens,
            clock=time.perf_counter,
        )
        self._metrics = metrics
        self._tokenizer = tokenizer
        self._target = target
        self._tracing = tracing
        self._decoding: dict[str, Session] = {}
        self._speculation = Speculation(
            target,
            draft,
            draft_ahead=settings.draft_ahead,
            clock=time.perf_counter,
        )
        metrics.active_sessions.set_function(lambda: len(self._decoding))
        for state in (SessionState.PREFILLING, SessionState.DECODING):
            metrics.sessions_by_state.labels(state.value).set_function(partial(self._count_sessions, state))
        metrics.session_tokens.set_function(
            lambda: sum(len(session.token_ids) for session in tuple(self._decoding.values()))
        )
        metrics.max_sessions.set(settings.max_sessions)
        metrics.max_queued_requests.set(settings.max_queued)
        metrics.queued_requests.set_function(lambda: self.admission.num_queued)
        metrics.reserved_tokens.set_function(lambda: self.admission.reserved_tokens)
        metrics.capacity_tokens.set_function(lambda: target.capacity_tokens)
        metrics.kept_sessions.set_function(lambda: len(self.sessions))
        metrics.kept_session_tokens.set_function(lambda: self.sessions.num_tokens)

    @property
    def target_is_there(self) -> bool:
        """Whether the target can take rounds now."""
        return self._target.model is not None

    def model_names(self) -> dict[str, str]:
        """Name the models, for logs."""
        draft = self.draft.model
        return {"target": self.model.name, "draft": draft.name if draft else f"none ({self.draft.fault})"}

    def decode_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included. May be called from any thread."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Emission]:
        """Generate what comes after a prompt, a round at a time; closing the iterator ends the generation.

        The session is kept, for another Generate to continue it, once this one finishes, and before the last emission.
        Raises ResourceExhaustedError, InvalidRequestError, NotFoundError, ConflictError, UnavailableError, or
        InternalError when the target refuses or breaks.
        """
        arrived_at = time.perf_counter()
        with self.admission.place() as place:  # before anything is done for it
            async with aclosing(self._take_turn(request, place, arrived_at)) as emissions:
                async for emission in emissions:
                    yield emission

    async def _take_turn(self, request: GenerationRequest, place: Place, arrived_at: float) -> AsyncGenerator[Emission]:
        """Run a turn of a session, new or kept."""
        if request.session_id:
            kept = self.sessions.acquire(request.session_id)
        else:
            kept = self.sessions.begin(secrets.token_hex(8))
        is_ours = True
        try:
            with structlog.contextvars.bound_contextvars(session_id=kept.session_id):
                prompt = await asyncio.to_thread(encode_prompt, self._tokenizer, request.prompt, kept)
                session, sampling, num_draft_tokens = self._plan(kept.session_id, prompt.token_ids, request)
                output = Output(
                    self._tokenizer,
                    prompt.token_ids,
                    stop_strings=request.stop.strings,
                    min_tokens=request.stop.min_tokens,
                )
                await place.admit(session.prompt_len + session.max_tokens)
                statistics = SessionStatistics(session.prompt_len, time.perf_counter() - arrived_at)
                reply: list[str] = []
                trace = None
                if self._tracing is not None:
                    trace = self._tracing.begin(session.session_id, arrived_at, request.traceparent)
                running = self._run(session, sampling, num_draft_tokens, output, statistics, arrived_at, trace)
                async with aclosing(running) as emissions:
                    async for emission in emissions:
                        reply.extend(token.text for token in emission.tokens)
                        if emission.finish_reason is not None:
                            token_ids = session.token_ids[: session.prompt_len + emission.statistics.generated_tokens]
                            chat = prompt.chat.replied("".join(reply)) if prompt.chat is not None else None
                            self.sessions.finish(kept, token_ids, chat)
                            is_ours = False
                        yield emission
        finally:
            if is_ours:
                self.sessions.abandon(kept)

    async def _run(
        self,
        session: Session,
        sampling: Sampling,
        num_draft_tokens: int | None,
        output: Output,
        statistics: SessionStatistics,
        arrived_at: float,
        trace: SessionTrace | None,
    ) -> AsyncGenerator[Emission]:
        """Decode a session. When the last emission comes, nothing of the session runs any more."""
        drafter = Drafter(
            self.draft,
            session.session_id,
            sampling,
            timeout_seconds=self.settings.draft_timeout_seconds,
            clock=time.perf_counter,
        )
        verifier = Verifier(
            self._target,
            session.session_id,
            sampling,
            timeout_seconds=self.settings.target_timeout_seconds,
            recovery_seconds=self.settings.target_recovery_seconds,
            clock=time.perf_counter,
        )
        speculation = self._speculation.begin(sampling, num_draft_tokens)
        self._decoding[session.session_id] = session
        self._metrics.prompt_tokens.inc(session.prompt_len)
        outcome = "failed"
        try:
            decoding = decode(session, speculation, drafter, verifier, clock=time.perf_counter)
            async with aclosing(run_ahead(decoding, limit=_ROUNDS_AHEAD)) as rounds:
                async for committed in rounds:
                    round_, tokens = output.take(committed)
                    self._metrics.count_round(round_, first=statistics.rounds == 0)
                    statistics.add(round_, arrived_at=arrived_at)
                    statistics.target_replays = verifier.num_replays
                    statistics.target_reused_tokens = verifier.reused_len or 0
                    statistics.draft_reused_tokens = drafter.reused_len or 0
                    if trace is not None:
                        trace.add(round_)
                    log.debug("round", number=statistics.rounds, accepted=round_.commit.num_accepted)
                    emission = Emission(
                        session.session_id, sampling.seed, tokens, round_, statistics, output.stop_string
                    )
                    if emission.finish_reason is not None:
                        outcome = emission.finish_reason.value
                        break
                    yield emission
        except WorkerError as error:
            raise InternalError(error.reason, str(error)) from error
        except (GeneratorExit, asyncio.CancelledError):  # the client went away
            outcome = "cancelled"
            raise
        finally:
            drafter.close()
            verifier.close()
            speculation.close()
            del self._decoding[session.session_id]
            self._metrics.count_session(statistics, outcome, target_replays=verifier.num_replays)
            if trace is not None:
                trace.end(statistics, outcome)
            log.info(
                "session ended",
                outcome=outcome,
                prompt_tokens=statistics.prompt_tokens,
                generated_tokens=statistics.generated_tokens,
                rounds=statistics.rounds,
                proposed=statistics.proposed_tokens,
                accepted=statistics.accepted_tokens,
            )
        yield emission

    def _count_sessions(self, state: SessionState) -> int:
        return sum(session.state is state for session in tuple(self._decoding.values()))

    def _plan(
        self, session_id: str, prompt_ids: list[int], request: GenerationRequest
    ) -> tuple[Session, Sampling, int | None]:
        """Check a request, and say what to decode, how to choose its tokens, and k if it is given.

        Raises InvalidRequestError.
        """
        num_draft_tokens = request.num_draft_tokens
        if num_draft_tokens is None:
            num_draft_tokens = self.settings.given_num_draft_tokens
        if num_draft_tokens is not None:
            check_num_draft_tokens(num_draft_tokens)
        request.sampling.check(vocabulary_size=self.model.vocabulary_size, model_name=self.model.name)
        check_prompt(self.model, prompt_ids)
        max_tokens = resolve_max_tokens(self.model, len(prompt_ids), request.max_tokens)
        stop = request.stop
        stop.check(self.model, max_tokens)
        session = Session(
            session_id=session_id,
            token_ids=prompt_ids,
            max_tokens=max_tokens,
            eos_token_ids=frozenset(() if stop.ignore_eos else self.model.eos_token_ids),
            stop_token_ids=frozenset(stop.token_ids),
            min_tokens=stop.min_tokens,
        )
        sampling = replace(request.sampling, vocabulary_size=self.model.vocabulary_size)
        if not stop.min_tokens:
            return session, sampling, num_draft_tokens
        suppressing = replace(
            sampling,
            suppressed_token_ids=tuple(sorted(session.eos_token_ids | session.stop_token_ids)),
            suppressed_before=session.prompt_len + stop.min_tokens,
        )
        return session, suppressing, num_draft_tokens
