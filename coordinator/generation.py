"""A generation: one request, from its admission to its statistics."""

from __future__ import annotations

import asyncio
import secrets
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import structlog

from coordinator.canary.canary_planner import CanaryPlanner
from coordinator.canary.choice import CanaryChoice
from coordinator.coordinator import Coordinator
from coordinator.core import Round, Session, SessionSetup
from coordinator.emission import Beginning, Emission
from coordinator.output import Output, prompt_tokens
from coordinator.planner.planner import Planner
from coordinator.planner.session_planner import SessionPlanner, kind_of
from coordinator.proposals.drafter import Drafter
from coordinator.proposals.grammar_proposer import GrammarProposer
from coordinator.proposals.lookup import Lookup
from coordinator.proposals.proposer import Proposer
from coordinator.proposals.self_drafter import SelfDrafter
from coordinator.proposals.source import Source
from coordinator.replicas.prefix_estimate import blocks_of
from coordinator.replicas.replica import Replica
from coordinator.replicas.route import SessionRoute
from coordinator.round_loop import RoundPlanner, decode, read_ahead
from coordinator.sessions.place import Place, Prompt
from coordinator.sessions.prompt import EncodedPrompt
from coordinator.sessions.request import GenerationRequest
from coordinator.sessions.resumption import prompt_fingerprint
from coordinator.sessions.session_model import model_for
from coordinator.sources import Sources
from coordinator.telemetry.statistics import SessionStatistics
from coordinator.workers.errors import WorkerError
from coordinator.workers.verifier import Verifier
from specd.errors import InternalError, InvalidRequestError, SpecdError
from specd.grammar import GRAMMAR_BROKEN, Grammar, SessionGrammar
from specd.matching.matcher import SessionMatcher
from specd.matching.vocabulary import compiling
from specd.text.reasoning import PROMPT_END_TOKENS, reply_grammar
from specd.vocabulary import TokenSource

log = structlog.get_logger()

# Rounds that a session may be ahead of its client.
_ROUNDS_AHEAD = 64


class Generation:
    """One request with its place, session, sources, stream to each worker, output and statistics."""

    def __init__(self, shared: Coordinator, request: GenerationRequest) -> None:
        """Check the request before any work is done for it.

        Raises InvalidRequestError, and ResourceExhaustedError for a client that has used up its quota.
        """
        self._arrived_at = time.perf_counter()
        self._shared = shared
        self._request = request
        request.check_session()
        self._sources = Sources.of(
            request.draft_source,
            request.num_draft_tokens,
            shared.available_sources,
            default_k=shared.settings.given_num_draft_tokens,
            predicts=bool(request.prediction),
            forces=request.grammar is not None,
        )
        shared.quotas.check(request.client, request.client_limits)

    async def emissions(self) -> AsyncGenerator[Emission]:
        """Generate the tokens after the prompt, a round at a time; closing the iterator ends the generation.

        The session is kept for another Generate once this one finishes, before the last emission, when all of its work
        has ended. If it does not finish, the session stays as it was. A resumption continues behind its tokens.
        Raises ResourceExhaustedError, InvalidRequestError, CannotResumeError, NotFoundError, ConflictError,
        UnavailableError, or InternalError when the target refuses or breaks.
        """
        request, shared = self._request, self._shared
        client, limits = request.client, request.client_limits
        with shared.admission.place(client, limits.max_sessions) as place:
            async with shared.quotas.held(client, limits), self._kept_session():
                await self._open(place)
                async with self._rounds(place) as rounds:
                    async for round_ in rounds:
                        emission = await self._emission(round_)
                        if emission.finish_reason is not None:
                            break
                        yield emission
                await self._keep(emission)
                yield emission

    @asynccontextmanager
    async def _kept_session(self) -> AsyncIterator[None]:
        """Acquire the session that the request continues, or a new one; it stays as it was unless it is kept."""
        request, sessions, keeper = self._request, self._shared.sessions, self._shared.keeper
        if request.session_id:
            await keeper.take(request.session_id, request.client)
            try:
                self._kept = sessions.acquire(request.session_id, request.client)
            except SpecdError:
                keeper.release(request.session_id, request.client)
                raise
        else:
            self._kept = sessions.begin(secrets.token_hex(8), request.client)
            self._kept.token_ids = array("I", request.resumption.session_token_ids)
        self._is_kept = False
        try:
            self._choose_model()
            with structlog.contextvars.bound_contextvars(session_id=self._kept.session_id):
                yield
        except SpecdError as error:
            error.session_id = self._kept.session_id
            raise
        finally:
            if not self._is_kept:
                sessions.abandon(self._kept)
                keeper.release(self._kept.session_id, request.client)

    def _choose_model(self) -> None:
        """Choose the target or one of its adapters, for all turns of the session."""
        target, session = self._shared.model, self._kept
        self._model = model_for(target, self._request.model, session)
        if not session.num_turns:
            session.adapter = target.adapter(self._model.name)

    @property
    def _adapter(self) -> str:
        return self._kept.adapter.name if self._kept.adapter is not None else ""

    async def _open(self, place: Place) -> None:
        """Encode the prompt, wait for the request's turn, and start its streams and planner."""
        request, shared = self._request, self._shared
        self._prompt = prompt = await shared.encode(request, self._kept)
        session, setup = self._session_of(prompt)
        matcher = None
        if request.grammar is not None:  # one that cannot be kept is refused before the wait for a turn
            matcher, grammar = await asyncio.get_running_loop().run_in_executor(
                compiling, self._in_form, session, prompt, request.grammar
            )
            setup = replace(setup, sampling=replace(setup.sampling, grammar=grammar))
        self._session, self._setup = session, setup
        self._output = Output(
            shared.tokenizer,
            prompt.token_ids,
            stop_strings=request.stop.strings,
            reasoning=request.stop.reasoning,
            min_tokens=request.stop.min_tokens,
        )
        self._reply = [await asyncio.to_thread(self._output.resume, request.resumption.token_ids)]
        self._beginning: Beginning | None = self._beginning_of(prompt)
        prompt_len = len(prompt.source) + session.prompt_len
        blocks: Sequence[bytes] = ()
        if len(shared.replicas.all) > 1:  # a single target is no choice
            blocks = await asyncio.to_thread(
                blocks_of,
                session.token_ids,
                namespace=request.namespace,
                source=prompt.source,
                adapter=self._adapter,
            )
        place.prompt = Prompt(prompt_len, session.max_tokens, blocks)
        await shared.admission.admit(place, session.prompt_len + session.max_tokens, len(prompt.source))
        settings, clock = shared.settings, time.perf_counter
        self._route = SessionRoute(session, place, shared.replicas, shared.admission, self._on_move)
        replica = self._route.replica
        target_draft = shared.self_draft(replica.worker)
        self._verifier = Verifier(
            self._route,
            setup,
            timeout_seconds=settings.target_timeout_seconds,
            recovery_seconds=settings.target_recovery_seconds,
            clock=clock,
            asks_ahead=target_draft is not None,
        )
        sources: list[Source] = []
        self._choice: CanaryChoice | None = None
        if TokenSource.DRAFT in self._sources.allowed:
            if target_draft is not None:
                sources.append(SelfDrafter(self._verifier, timeout_seconds=settings.draft_timeout_seconds))
            else:
                sources.append(self._drafter(setup))
        if TokenSource.LOOKUP in self._sources.allowed:
            text = tuple(session.token_ids)
            sources.append(await asyncio.to_thread(Lookup, text, source=prompt.source, prediction=prompt.prediction))
        if matcher is not None:
            forces = TokenSource.FORCED in self._sources.allowed
            self._proposer: Proposer = GrammarProposer(sources, matcher, forces=forces)
        else:
            self._proposer = Proposer(sources)
        # With another adapter, other proposals are accepted.
        learner = f"{request.client}\0{self._adapter}" if self._adapter else request.client
        self._planner = SessionPlanner(
            self._planner_at(replica),
            setup.sampling,
            self._sources,
            client=learner,
            is_paused=lambda: place.is_paused,
            asks_ahead=target_draft is not None,
        )
        self._statistics = SessionStatistics(prompt_len, clock() - self._arrived_at)
        begin_trace = shared.begin_trace
        self._trace = begin_trace and begin_trace(session.session_id, self._arrived_at, request.traceparent)
        self._outcome = "failed"
        shared.decoding[session.session_id] = session
        shared.metrics.count_prompt(prompt_len)

    @asynccontextmanager
    async def _rounds(self, place: Place) -> AsyncIterator[AsyncGenerator[Round]]:
        """Decode, ahead of the client, and close the request's resources when its rounds are no longer read."""
        planner: RoundPlanner = self._planner
        if self._choice is not None:
            planner = CanaryPlanner(self._planner, self._choice, lambda: self._planner_at(self._route.replica))
        decoding = decode(self._session, planner, self._proposer, self._verifier, clock=time.perf_counter)
        try:
            async with aclosing(read_ahead(decoding, self._shared.admission, place, limit=_ROUNDS_AHEAD)) as rounds:
                yield rounds
        except WorkerError as error:
            if error.reason == GRAMMAR_BROKEN:
                raise InvalidRequestError(error.reason, str(error)) from error
            raise InternalError(error.reason, str(error)) from error
        except (GeneratorExit, asyncio.CancelledError):  # the client has disconnected
            self._outcome = "cancelled"
            raise
        finally:
            self._close()

    def _on_move(self, replica: Replica) -> None:
        """Continue at another target."""
        self._planner.move(self._planner_at(replica))
        self._shared.metrics.count_move()

    def _drafter(self, setup: SessionSetup) -> Drafter:
        """Return the source of a draft worker's tokens: the present one's, or the canary's in its turn."""
        shared, sampling = self._shared, setup.sampling
        if shared.canary is not None:
            # Other tokens are accepted under a bias, in a form, and with an adapter, and a given k ends none early.
            is_free = not sampling.changes_logits, sampling.grammar is None, self._sources.k is None
            kind = kind_of(sampling), is_free, self._adapter
            self._choice = CanaryChoice(shared.canary, kind)
        drafts = self._choice.drafts if self._choice is not None else lambda: shared.drafts
        shared.metrics.count_draft_session(is_canary=self._choice is not None and self._choice.is_canary)
        free = replace(setup, sampling=replace(sampling, grammar=None))  # a draft worker masks nothing
        return Drafter(drafts, free, timeout_seconds=shared.settings.draft_timeout_seconds, clock=time.perf_counter)

    def _planner_at(self, replica: Replica) -> Planner:
        """Return the planner of the sessions at a target with the same draft."""
        return replica.planner if self._choice is None else replica.planner_of(is_canary=self._choice.is_canary)

    def _close(self) -> None:
        request, shared, session, statistics = self._request, self._shared, self._session, self._statistics
        self._proposer.close()
        self._verifier.close()
        self._planner.close()
        shared.replicas.count_generated(session.num_generated)
        shared.quotas.count(request.client, request.client_limits, statistics.prompt_tokens + session.num_generated)
        del shared.decoding[session.session_id]
        shared.metrics.count_session(statistics, self._outcome)
        if self._trace:
            self._trace.end(statistics, self._outcome)
        log.info(
            "session ended",
            outcome=self._outcome,
            prompt_tokens=statistics.prompt_tokens,
            generated_tokens=statistics.generated_tokens,
            rounds=statistics.rounds,
            proposed=statistics.proposed_tokens,
            accepted=statistics.accepted_tokens,
        )

    async def _emission(self, committed: Round) -> Emission:
        """Return the emission of a round, and count it."""
        round_, tokens = self._output.take(committed)
        self._reply += [token.text for token in tokens]
        statistics = self._statistics
        self._shared.metrics.count_round(
            round_, first=statistics.rounds == 0, constrained=self._request.grammar is not None
        )
        statistics.add(round_, arrived_at=self._arrived_at)
        if self._trace:
            self._trace.add(round_)
        log.debug("round", number=statistics.rounds, accepted=round_.commit.num_accepted)
        if round_.commit.finish_reason is not None:
            self._outcome = round_.commit.finish_reason.value
        beginning, self._beginning = self._beginning, None
        if beginning is not None and self._request.echo:
            beginning = await self._echo(beginning, round_)
        sampling, stop_string = self._setup.sampling, self._output.stop_string
        return Emission(self._kept.session_id, sampling.seed, tokens, round_, statistics, stop_string, beginning)

    async def _keep(self, last: Emission) -> None:
        """Keep the session with the generated tokens, for another Generate."""
        assert last.finish_reason is not None
        num_tokens = self._session.prompt_len + self._statistics.generated_tokens
        chat = self._prompt.chat
        if chat is not None:
            chat = chat.replied(self._output.reply("".join(self._reply), last.tokens[-1], last.finish_reason))
        self._shared.sessions.finish(self._kept, self._session.token_ids[:num_tokens], chat, self._prompt.source)
        self._is_kept = True
        if self._shared.sessions.has(self._kept):
            await self._shared.keeper.save(self._kept)
        else:
            self._shared.keeper.release(self._kept.session_id, self._request.client)

    def _session_of(self, prompt: EncodedPrompt) -> tuple[Session, SessionSetup]:
        """Return the session that continues a prompt, and its setup. Raises InvalidRequestError."""
        request, model = self._request, self._model
        max_tokens = request.check(model, prompt)
        if len(prompt.source) > (trained := model.trained_source_length):
            log.warning("a source is longer than any in the training", tokens=len(prompt.source), trained=trained)
        stop, resumed = request.stop, request.resumption.token_ids
        # Resumed tokens are part of the prompt for the rounds: the caches are empty, and all positions stay the same.
        session = Session(
            session_id=self._kept.session_id,
            token_ids=[*prompt.token_ids, *resumed],
            max_tokens=max_tokens - len(resumed),
            eos_token_ids=frozenset(() if stop.ignore_eos else model.eos_token_ids),
            stop_token_ids=frozenset(stop.token_ids),
            min_tokens=max(stop.min_tokens - len(resumed), 0),
        )
        sampling = replace(request.sampling, vocabulary_size=model.vocabulary_size)
        if stop.min_tokens:
            sampling = replace(
                sampling,
                suppressed_token_ids=tuple(sorted(session.eos_token_ids | session.stop_token_ids)),
                suppressed_before=len(prompt.token_ids) + stop.min_tokens,
            )
        setup = SessionSetup(
            session.session_id, sampling, prompt.source, namespace=request.namespace, adapter=self._adapter
        )
        return session, setup

    def _in_form(self, session: Session, prompt: EncodedPrompt, form: Grammar) -> tuple[SessionMatcher, SessionGrammar]:
        """Return the grammar of the reply's tokens, and a matcher of the session's, which must keep it.

        Raises InvalidRequestError.
        """
        vocabulary = self._shared.grammar_vocabulary
        try:
            grammar = reply_grammar(self._shared.tokenizer, prompt.token_ids, form, self._request.stop.reasoning)
        except (ValueError, RecursionError) as error:
            vocabulary.compile(form)  # an error of the form itself has its own words
            raise InvalidRequestError("BAD_GRAMMAR", f"grammar.{form.kind.value} cannot be kept: {error}") from error
        if grammar.grammar is not form:
            vocabulary.compile(form)  # errors are about the form as it was asked for, without the reasoning
        matcher = SessionMatcher(vocabulary, grammar)
        matcher.follow(session.token_ids)
        return matcher, grammar

    def _beginning_of(self, prompt: EncodedPrompt) -> Beginning:
        shared, request = self._shared, self._request
        end = shared.decode_text(prompt.token_ids[-PROMPT_END_TOKENS:]) if prompt.chat else ""
        num_tokens = len(request.resumption.token_ids) + self._session.max_tokens
        beginning = Beginning(prompt_fingerprint(self._model, prompt), num_tokens, end)
        if not request.returns_prompt:
            return beginning
        return replace(beginning, prompt_token_ids=prompt.token_ids, source_token_ids=prompt.source)

    async def _echo(self, beginning: Beginning, first: Round) -> Beginning:
        values = first.verdict.prompt_log_probabilities if first.verdict.log_probabilities else None
        tokens = await asyncio.to_thread(prompt_tokens, self._shared.tokenizer, self._prompt.token_ids, values)
        return replace(beginning, prompt_tokens=tokens)
