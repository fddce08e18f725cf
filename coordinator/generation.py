"""The coordinator: takes requests, keeps their sessions, and drives their rounds."""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import structlog

from coordinator.core import Round, Session, SessionSetup
from coordinator.output import EmittedToken, Output, prompt_tokens
from coordinator.planner.cost_model import CostModel
from coordinator.planner.planner import Planner
from coordinator.proposals.lookup import Lookup
from coordinator.proposals.proposer import Proposer
from coordinator.round_loop import decode, read_ahead
from coordinator.sessions.admission import Admission, Place
from coordinator.sessions.prompt import (
    EncodedPrompt,
    check_beginning,
    encode_answer,
    encode_prompt,
    encode_source,
    whole_conversation,
)
from coordinator.sessions.quota import Quotas
from coordinator.sessions.request import GenerationRequest
from coordinator.sessions.resumption import prompt_fingerprint
from coordinator.sessions.session_store import KeptSession, SessionStore
from coordinator.sources import Sources
from coordinator.telemetry.metrics import CoordinatorMetrics
from coordinator.telemetry.statistics import SessionStatistics
from coordinator.workers.drafter import Drafter, DraftStream
from coordinator.workers.errors import WorkerError
from coordinator.workers.remote_worker import RemoteWorker
from coordinator.workers.verifier import TargetStream, Verifier
from specd.errors import InternalError, InvalidRequestError, SpecdError
from specd.model_info import ModelInfo
from specd.settings import CoordinatorSettings
from specd.text.chat import Chat
from specd.text.kept_tokens import with_kept_tokens
from specd.text.literals import Literals
from specd.text.reasoning import PROMPT_END_TOKENS
from specd.text.rendering import TemplateRenderer
from specd.text.tokenizer import Tokenizer
from specd.vocabulary import FinishReason, TokenSource

if TYPE_CHECKING:
    from coordinator.telemetry.tracing import BeginTrace  # OpenTelemetry need not be there

log = structlog.get_logger()

# Rounds that a session may be ahead of its client.
_ROUNDS_AHEAD = 64


@dataclass(frozen=True)
class Beginning:
    """What a generation continues: a digest for its resumption, and if they were asked for, tokens and source.

    `max_tokens` is how many tokens it may have at most. Of a conversation, `prompt_end` is the end of the prompt, as
    the template wrote it. `prompt_tokens` are its echo.
    """

    prompt_fingerprint: str
    max_tokens: int
    prompt_end: str = ""
    prompt_token_ids: Sequence[int] = ()
    source_token_ids: Sequence[int] = ()
    prompt_tokens: Sequence[EmittedToken] = ()


@dataclass(frozen=True)
class Emission:
    """What one round gives the client.

    The first one has the beginning; the last one has a finish reason, and the stop string if that was it.
    """

    session_id: str
    seed: int
    tokens: list[EmittedToken]
    round: Round
    statistics: SessionStatistics
    stop_string: str | None = None
    beginning: Beginning | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why this is the last one, if it is. The session itself may be rounds ahead."""
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
        target: RemoteWorker[TargetStream],
        draft: RemoteWorker[DraftStream],
        begin_trace: BeginTrace | None = None,
    ) -> None:
        """Use a target that is there with this model and tokenizer; without `begin_trace` there are no spans."""
        self.settings = settings
        self.model = model
        self.target = target
        self.draft = draft
        self.sessions = SessionStore(
            settings.session_idle_seconds, settings.session_budget_tokens, time.time, time.monotonic
        )
        costs = CostModel(lambda: target.step_costs, lambda: draft.step_costs)
        self.planner = Planner(costs, clock=time.perf_counter)
        self.admission = Admission(
            max_sessions=settings.max_sessions,
            max_queued=settings.max_queued,
            capacity_bytes=lambda: target.cache_bytes,
            bytes_for=lambda *num_tokens: target.footprint.bytes_for(*num_tokens),  # noqa: PLW0108 - of now
            seconds_per_token=self.planner.speed.seconds_per_token,
            clock=time.perf_counter,
        )
        self.quotas = Quotas(time.perf_counter)
        self._metrics = metrics
        self.tokenizer = tokenizer
        self._begin_trace = begin_trace
        self.renderer = TemplateRenderer(tokenizer.template, seconds=settings.chat_template_seconds)
        self._decoding: dict[str, Session] = {}
        self._show_gauges()

    def model_names(self) -> dict[str, str]:
        """Name the models, for logs."""
        draft = self.draft.model
        return {"target": self.model.name, "draft": draft.name if draft else f"none ({self.draft.fault})"}

    def decode_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included. Safe on any thread."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Emission]:
        """Generate what comes after a prompt, a round at a time; closing the iterator ends the generation.

        The session is kept for another Generate once this one finishes, before the last emission. If it does not
        finish, the session is as it was. A resumption goes on behind the tokens that it brings.
        Raises ResourceExhaustedError, InvalidRequestError, CannotResumeError, NotFoundError, ConflictError,
        UnavailableError, or InternalError when the target refuses or breaks.
        """
        arrived_at = time.perf_counter()
        request.check_session()
        sources = Sources.of(
            request.draft_source, request.num_draft_tokens, self.settings, predicts=bool(request.prediction)
        )
        self.quotas.check(request.client, request.client_limits)
        # Before anything is done for it.
        with self.admission.place(request.client, request.client_limits.max_sessions) as place:
            if request.session_id:
                kept = self.sessions.acquire(request.session_id, request.client)
            else:
                kept = self.sessions.begin(secrets.token_hex(8), request.client)
                kept.token_ids = array("I", request.resumption.session_token_ids)
            is_finished = False
            try:
                with structlog.contextvars.bound_contextvars(session_id=kept.session_id):
                    prompt = await self.encode(request, kept)
                    session, setup = self._begin(kept.session_id, prompt, request)
                    output = self._output(prompt, request)
                    reply = [await asyncio.to_thread(output.resume, request.resumption.token_ids)]
                    beginning: Beginning | None = self._beginning(prompt, request, session.max_tokens)
                    await place.admit(session.prompt_len + session.max_tokens, len(prompt.source))
                    lookup = None
                    if TokenSource.LOOKUP in sources.allowed:
                        lookup = await asyncio.to_thread(
                            Lookup, tuple(session.token_ids), source=prompt.source, prediction=prompt.prediction
                        )
                    async with aclosing(
                        self._run(request, sources, place, session, setup, lookup, output, arrived_at)
                    ) as emissions:
                        async for emission in emissions:
                            reply.extend(token.text for token in emission.tokens)
                            if emission.finish_reason is not None:
                                num_tokens = session.prompt_len + emission.statistics.generated_tokens
                                said = output.reply("".join(reply), emission.tokens[-1], emission.finish_reason)
                                chat = prompt.chat.replied(said) if prompt.chat is not None else None
                                self.sessions.finish(kept, session.token_ids[:num_tokens], chat, prompt.source)
                                is_finished = True
                            if beginning is not None and request.echo:
                                beginning = await self._echo(beginning, prompt, emission.round)
                            yield replace(emission, beginning=beginning)
                            beginning = None
            except SpecdError as error:
                error.session_id = kept.session_id
                raise
            finally:
                if not is_finished:
                    self.sessions.abandon(kept)

    async def encode(self, request: GenerationRequest, kept: KeptSession) -> EncodedPrompt:
        """Return the tokens that a request starts from, beside the event loop."""
        if not isinstance(request.prompt, Chat) or self.model.has_encoder:
            return await asyncio.to_thread(self._encode_text, request, kept)
        chat = whole_conversation(request.prompt, kept)
        await asyncio.to_thread(check_beginning, self.tokenizer, request.prompt, self.model.context_length)
        try:
            token_ids = await self._encode_chat(chat, request.client)
        except InvalidRequestError as error:
            if error.reason != "CHAT_TEMPLATE_FAILED" or not any(chat.special_tokens.values()):
                raise
            # Some templates, such as gpt-oss's, refuse a message with special tokens.
            token_ids = await self._encode_chat(chat.without_special_tokens(), request.client)
        return await asyncio.to_thread(
            lambda: EncodedPrompt(
                with_kept_tokens(self.tokenizer, kept.token_ids, token_ids),
                chat,
                prediction=encode_answer(self.tokenizer, request.prediction),
            )
        )

    async def _encode_chat(self, chat: Chat, client: str) -> list[int]:
        literals = Literals(self.tokenizer)
        text = await self.renderer.render(await asyncio.to_thread(literals.hidden_in, chat), client)
        return await asyncio.to_thread(literals.encode, text)

    def _encode_text(self, request: GenerationRequest, kept: KeptSession) -> EncodedPrompt:
        if self.model.has_encoder:
            prompt = encode_source(self.tokenizer, request.prompt, request.answer, kept, self.model)
        else:
            assert not isinstance(request.prompt, Chat)
            check_beginning(self.tokenizer, request.prompt, self.model.context_length)
            prompt = encode_prompt(self.tokenizer, request.prompt, kept)
        return replace(prompt, prediction=encode_answer(self.tokenizer, request.prediction))

    def _output(self, prompt: EncodedPrompt, request: GenerationRequest) -> Output:
        stop = request.stop
        return Output(
            self.tokenizer,
            prompt.token_ids,
            stop_strings=stop.strings,
            reasoning=stop.reasoning,
            min_tokens=stop.min_tokens,
        )

    def _beginning(self, prompt: EncodedPrompt, request: GenerationRequest, max_tokens: int) -> Beginning:
        end = self.decode_text(prompt.token_ids[-PROMPT_END_TOKENS:]) if prompt.chat else ""
        num_resumed = len(request.resumption.token_ids)
        beginning = Beginning(prompt_fingerprint(self.model, prompt), num_resumed + max_tokens, end)
        if not request.returns_prompt:
            return beginning
        return replace(beginning, prompt_token_ids=prompt.token_ids, source_token_ids=prompt.source)

    async def _echo(self, beginning: Beginning, prompt: EncodedPrompt, first: Round) -> Beginning:
        values = first.verdict.prompt_log_probabilities if first.verdict.log_probabilities else None
        tokens = await asyncio.to_thread(prompt_tokens, self.tokenizer, prompt.token_ids, values)
        return replace(beginning, prompt_tokens=tokens)

    async def _run(
        self,
        request: GenerationRequest,
        sources: Sources,
        place: Place,
        session: Session,
        setup: SessionSetup,
        lookup: Lookup | None,
        output: Output,
        arrived_at: float,
    ) -> AsyncGenerator[Emission]:
        """Decode a session. When the last emission comes, nothing of the session runs any more."""
        settings, session_id, sampling = self.settings, setup.session_id, setup.sampling
        drafter = Drafter(self.draft, setup, timeout_seconds=settings.draft_timeout_seconds, clock=time.perf_counter)
        verifier = Verifier(
            self.target,
            setup,
            timeout_seconds=settings.target_timeout_seconds,
            recovery_seconds=settings.target_recovery_seconds,
            clock=time.perf_counter,
        )
        proposer = Proposer(drafter, lookup)
        planner = self.planner.begin(sampling, sources, client=request.client, is_paused=lambda: place.is_paused)
        prompt_len = len(setup.source) + session.prompt_len
        statistics = SessionStatistics(prompt_len, time.perf_counter() - arrived_at)
        trace = self._begin_trace and self._begin_trace(session_id, arrived_at, request.traceparent)
        self._decoding[session_id] = session
        self._metrics.count_prompt(prompt_len)
        outcome = "failed"
        try:
            decoding = decode(session, planner, proposer, verifier, clock=time.perf_counter)
            async with aclosing(read_ahead(decoding, place, limit=_ROUNDS_AHEAD)) as rounds:
                async for committed in rounds:
                    round_, tokens = output.take(committed)
                    self._metrics.count_round(round_, first=statistics.rounds == 0)
                    statistics.add(round_, arrived_at=arrived_at)
                    if trace:
                        trace.add(round_)
                    log.debug("round", number=statistics.rounds, accepted=round_.commit.num_accepted)
                    emission = Emission(session_id, sampling.seed, tokens, round_, statistics, output.stop_string)
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
            proposer.close()
            verifier.close()
            planner.close()
            self.quotas.count(request.client, request.client_limits, prompt_len + session.num_generated)
            del self._decoding[session_id]
            self._metrics.count_session(statistics, outcome)
            if trace:
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

    def _begin(
        self, session_id: str, prompt: EncodedPrompt, request: GenerationRequest
    ) -> tuple[Session, SessionSetup]:
        """Return the session of a request and its setup. Raises InvalidRequestError."""
        max_tokens = request.check(self.model, prompt)
        if len(prompt.source) > (trained := self.model.trained_source_length):
            log.warning("a source is longer than any in the training", tokens=len(prompt.source), trained=trained)
        stop, resumed = request.stop, request.resumption.token_ids
        # To the rounds what is resumed is prompt: its caches are empty, and all positions are as they were.
        session = Session(
            session_id=session_id,
            token_ids=[*prompt.token_ids, *resumed],
            max_tokens=max_tokens - len(resumed),
            eos_token_ids=frozenset(() if stop.ignore_eos else self.model.eos_token_ids),
            stop_token_ids=frozenset(stop.token_ids),
            min_tokens=max(stop.min_tokens - len(resumed), 0),
        )
        sampling = replace(request.sampling, vocabulary_size=self.model.vocabulary_size)
        if stop.min_tokens:
            sampling = replace(
                sampling,
                suppressed_token_ids=tuple(sorted(session.eos_token_ids | session.stop_token_ids)),
                suppressed_before=len(prompt.token_ids) + stop.min_tokens,
            )
        return session, SessionSetup(session_id, sampling, prompt.source, namespace=request.namespace)

    def _show_gauges(self) -> None:
        show, sessions = self._metrics.show, self._decoding.values()
        show("active_sessions", lambda: len(self._decoding))
        show("session_tokens", lambda: sum(len(session.token_ids) for session in tuple(sessions)))
        show("paused_sessions", lambda: self.admission.num_paused)
        show("queued_requests", lambda: self.admission.num_queued)
        show("max_sessions", lambda: self.settings.max_sessions)
        show("max_queued_requests", lambda: self.settings.max_queued)
        show("reserved_bytes", lambda: self.admission.reserved_bytes)
        show("capacity_bytes", lambda: self.target.cache_bytes)
        show("kept_sessions", lambda: len(self.sessions))
        show("kept_session_tokens", lambda: self.sessions.num_tokens)
        for state, is_decoding in (("prefilling", False), ("decoding", True)):
            show("sessions_by_state", partial(self._count_sessions, is_decoding=is_decoding), state)

    def _count_sessions(self, *, is_decoding: bool) -> int:
        return sum((session.num_generated > 0) == is_decoding for session in tuple(self._decoding.values()))
