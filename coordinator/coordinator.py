"""The shared parts of all requests: the workers, admission, sessions, quotas and the tokenizer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING

from coordinator.canary.canary import Canary
from coordinator.core import Session
from coordinator.proposals.drafter import DraftStream
from coordinator.proposals.drafts import Drafts
from coordinator.replicas.replica import DraftFacts, Replica
from coordinator.replicas.replicas import Replicas
from coordinator.sessions.admission import Admission
from coordinator.sessions.capacities import Capacities
from coordinator.sessions.prompt import (
    EncodedPrompt,
    beginning_characters,
    check_beginning,
    check_length,
    encode_answer,
    encode_prompt,
    encode_source,
    whole_conversation,
)
from coordinator.sessions.quota import Quotas
from coordinator.sessions.request import GenerationRequest
from coordinator.sessions.request_counts import RequestCounts
from coordinator.sessions.session_keeper import SessionKeeper
from coordinator.sessions.session_model import find_model, models_of
from coordinator.sessions.session_store import KeptSession, SessionStore
from coordinator.sources import available_sources
from coordinator.telemetry.metrics import CoordinatorMetrics
from coordinator.workers.remote_worker import RemoteWorker, TargetDraft
from coordinator.workers.verifier import TargetStream
from coordinator.workers.workers import Workers
from specd.coordinator_settings import CoordinatorSettings
from specd.errors import InvalidRequestError
from specd.matching.vocabulary import GrammarVocabulary
from specd.model_info import ModelInfo
from specd.sampling import check_count, check_token_ids
from specd.step_costs import StepCosts
from specd.text.chat import Chat
from specd.text.kept_tokens import with_kept_tokens
from specd.text.literals import Literals
from specd.text.rendering import TemplateRenderer
from specd.text.tokenizer import Tokenizer
from specd.vocabulary import TokenSource

if TYPE_CHECKING:
    from coordinator.telemetry.tracing import BeginTrace  # OpenTelemetry need not be there


class Coordinator:
    """Shared by all requests for a model: the targets, the drafts, admission, sessions and quotas."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        metrics: CoordinatorMetrics,
        *,
        model: ModelInfo,
        tokenizer: Tokenizer,
        targets: Workers[TargetStream],
        drafts: Workers[DraftStream],
        sessions: SessionStore,
        canary: Canary | None = None,
        name: str = "",
        num_requests: RequestCounts | None = None,
    ) -> None:
        """Use targets of which one is there with this model and tokenizer, and these drafts or the canary.

        The model has the name, if one is given. `num_requests` counts the requests of each client for all models.
        """
        self.settings = settings
        self._name = name
        self.model = self._named(model)
        self.metrics = metrics
        self._target_names: dict[str, str] = {}  # by address
        self.canary = canary
        self._present = canary.drafts[False] if canary is not None else Drafts(drafts)
        self.replicas = Replicas(targets, self._new_replica, self._remove_replica)
        self.sessions = sessions
        capacities = Capacities(self.replicas.capacities, self.replicas.choose)
        self.admission = Admission(
            capacities, max_queued=settings.max_queued, clock=time.perf_counter, num_requests=num_requests
        )
        self.quotas = Quotas(time.perf_counter)
        self.tokenizer = tokenizer
        self.grammar_vocabulary = GrammarVocabulary(
            tokenizer, size=model.vocabulary_size, eos_token_ids=model.eos_token_ids
        )
        self.begin_trace: BeginTrace | None = None  # set where there are spans
        self.keeper = SessionKeeper()
        self.renderer = TemplateRenderer(
            tokenizer.template,
            seconds=settings.chat_template_seconds,
            beginning_characters=beginning_characters(model.context_length),
        )
        self.decoding: dict[str, Session] = {}
        self._show_gauges()

    def _new_replica(self, worker: RemoteWorker[TargetStream]) -> Replica:
        def facts_of(drafts: Drafts[DraftStream]) -> DraftFacts:
            def costs() -> StepCosts | None:
                return (self.self_draft(worker) or drafts.workers.first).step_costs

            def models() -> Iterable[ModelInfo | None]:
                own = self.self_draft(worker)
                return (own.model, None) if own is not None else (drafts.workers.model,)

            return DraftFacts(costs, models)

        canary = self.canary
        replica = Replica(
            worker,
            draft=facts_of(self._present),
            canary=facts_of(canary.drafts[True]) if canary is not None else None,
            canary_leads=lambda: canary is not None and canary.leads,
            max_sessions=self.settings.max_sessions,
            name=self._name_of(worker.address),
        )
        replica.recall_learnt()
        for name, value in _target_gauges(replica).items():
            self.metrics.show(name, value, replica.name)
        return replica

    @property
    def drafts(self) -> Drafts[DraftStream]:
        """The drafts that propose for most sessions."""
        return self.canary.drafts[self.canary.leads] if self.canary is not None else self._present

    def _name_of(self, address: str) -> str:
        """Return a target's name in metrics: its address, or of a Unix socket the file, if no other has that name."""
        short = PurePath(address).name if address.startswith("unix:") else address
        name = address if short in self._target_names.values() else short
        return self._target_names.setdefault(address, name)

    def _remove_replica(self, replica: Replica) -> None:
        del self._target_names[replica.worker.address]
        for name in _target_gauges(replica):
            self.metrics.hide(name, replica.name)

    def self_draft(self, target: RemoteWorker[TargetStream]) -> TargetDraft | None:
        """Return what a target worker proposes tokens with, if it does so instead of a draft worker."""
        return None if self.settings.draft else target.self_draft

    def _named(self, model: ModelInfo) -> ModelInfo:
        return replace(model, name=self._name) if self._name else model

    def hide_targets(self) -> None:
        """Remove the targets from the metrics."""
        for replica in self.replicas.all:
            self._remove_replica(replica)

    @property
    def target_draft(self) -> TargetDraft | None:
        """What the target workers propose tokens with, if they do so instead of a draft worker."""
        own = (self.self_draft(worker) for worker in self.replicas.workers.ready)
        return next((draft for draft in own if draft is not None), None)

    @property
    def available_sources(self) -> tuple[TokenSource, ...]:
        """The sources that there are."""
        return available_sources(self.settings, target_drafts=self.target_draft is not None)

    @property
    def served_model(self) -> ModelInfo:
        """The model of requests that name none: the target as it is now, or was last."""
        model = self.replicas.workers.model
        return self._named(model) if model is not None else self.model

    def check_model(self, name: str) -> None:
        """Raise NotFoundError unless this is the name of a served model, or empty."""
        find_model(self.served_model, name)

    @property
    def models(self) -> list[ModelInfo]:
        """The models that requests can name: the served model, then the same with each of its adapters."""
        return models_of(self.served_model)

    @property
    def draft_model(self) -> ModelInfo | None:
        """The draft model, if it is there."""
        return self.target_draft.model if self.target_draft is not None else self.drafts.workers.model

    @property
    def draft_fault(self) -> str:
        """Why there is no draft model, for programs; "" if it is there."""
        return "" if self.draft_model is not None else self.drafts.workers.first.fault

    def model_names(self) -> dict[str, str]:
        """Name the models, for logs."""
        draft = self.draft_model
        return {"target": self.model.name, "draft": draft.name if draft else f"none ({self.draft_fault})"}

    def decode_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included. Safe on any thread."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

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

    async def encode_text(self, text: str) -> list[int]:
        """Return the tokens of a text alone. Raises InvalidRequestError for one that exceeds the context by far."""
        await asyncio.to_thread(check_beginning, self.tokenizer, text, self.model.context_length)
        return await asyncio.to_thread(partial(self.tokenizer.encode, text, add_special_tokens=False))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, with the names of special ones. Raises InvalidRequestError."""
        check_count("token_ids", len(token_ids), self.model.context_length)
        model = self.model
        check_token_ids("token_ids", token_ids, vocabulary_size=model.vocabulary_size, model_name=model.short_name)
        return await asyncio.to_thread(partial(self.tokenizer.decode, token_ids, skip_special_tokens=False))

    async def _encode_chat(self, chat: Chat, client: str) -> list[int]:
        literals = Literals(self.tokenizer)
        # Tools and fields of messages can be as long as what is said.
        check = partial(check_length, encode=literals.encode, context_length=self.model.context_length)
        text = await self.renderer.render(await asyncio.to_thread(literals.hidden_in, chat), client, check)
        return await asyncio.to_thread(literals.encode, text)

    def _encode_text(self, request: GenerationRequest, kept: KeptSession) -> EncodedPrompt:
        if self.model.has_encoder:
            prompt = encode_source(self.tokenizer, request.prompt, request.answer, kept, self.model)
        else:
            assert not isinstance(request.prompt, Chat)
            check_beginning(self.tokenizer, request.prompt, self.model.context_length)
            prompt = encode_prompt(self.tokenizer, request.prompt, kept)
        return replace(prompt, prediction=encode_answer(self.tokenizer, request.prediction))

    def _show_gauges(self) -> None:
        show, sessions = self.metrics.show, self.decoding.values()
        show("active_sessions", lambda: len(self.decoding))
        show("session_tokens", lambda: sum(len(session.token_ids) for session in tuple(sessions)))
        show("paused_sessions", lambda: self.admission.num_paused)
        show("queued_requests", lambda: self.admission.num_queued)
        show("max_sessions", lambda: self.admission.capacities.max_sessions)
        show("max_queued_requests", lambda: self.settings.max_queued)
        show("reserved_bytes", lambda: self.admission.capacities.reserved_bytes)
        show("capacity_bytes", lambda: self.admission.capacities.num_bytes)
        show("kept_sessions", lambda: len(self.sessions))
        show("kept_session_tokens", lambda: self.sessions.idle.num_tokens)
        for state, is_decoding in (("prefilling", False), ("decoding", True)):
            show("sessions_by_state", partial(self._count_sessions, is_decoding=is_decoding), state)

    def _count_sessions(self, *, is_decoding: bool) -> int:
        return sum((session.num_generated > 0) == is_decoding for session in tuple(self.decoding.values()))


def _target_gauges(replica: Replica) -> dict[str, Callable[[], float]]:
    return {
        "target_sessions": lambda: replica.capacity.num_running,
        "target_max_sessions": lambda: replica.capacity.max_sessions,
        "target_ready": lambda: replica.worker.model is not None,
    }
