"""The workers of a cell: the connections to them, and the checks that they fit together."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, TypeVar

import structlog

from coordinator.canary.canary import Canary
from coordinator.canary.judgement import CanaryState
from coordinator.proposals.drafter import DraftStream
from coordinator.telemetry.metrics import CoordinatorMetrics
from coordinator.workers.connection import WorkerConnection
from coordinator.workers.discovery import Discovery
from coordinator.workers.errors import RefusedModelError
from coordinator.workers.link import WorkerLink
from coordinator.workers.remote_worker import RemoteWorker
from coordinator.workers.session_calls import propose_calls, verify_calls
from coordinator.workers.stream import GrpcDraftStream, GrpcTargetStream
from coordinator.workers.verifier import TargetStream
from coordinator.workers.workers import Workers
from specd.addresses import split_addresses
from specd.coordinator_settings import CoordinatorSettings
from specd.errors import StartupError
from specd.identity.certificates import Certificates
from specd.model_info import ModelInfo, encoder_conflict, tokenizer_conflict
from specd.text.tokenizer import Tokenizer

Stream = TypeVar("Stream")

log = structlog.get_logger()


class Cell:
    """The targets and drafts of a coordinator, each of which may come, go and come back.

    All targets serve one model, and all drafts have its tokenizer. A worker that does not fit is refused, with a reason
    in the log, and the others serve.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        certificates: Certificates | None,
        metrics: CoordinatorMetrics,
        connections: AsyncExitStack,
    ) -> None:
        """Close everything with `connections`."""
        self.on_change: Callable[[], Awaitable[None]] | None = None  # called when a target comes or goes
        self.targets = Workers[TargetStream](fault="TARGET_UNAVAILABLE")
        self.drafts = Workers[DraftStream](fault="DRAFT_UNAVAILABLE")
        self.canary: Canary | None = None  # a second draft on trial
        self._dismissing: asyncio.Future[None] | None = None
        self._settings, self._certificates, self._metrics = settings, certificates, metrics
        self._connections = connections
        self._fetching = asyncio.Lock()
        self._model: ModelInfo | None = None  # of the first target
        self._tokenizer: Tokenizer | None = None
        self._certain: tuple[str, str] | None = None  # a target's address, and the whole fingerprint of its model

    async def connect_targets(self) -> tuple[ModelInfo, Tokenizer]:
        """Wait for a target without limit, and return its model. Raises StartupError if all of them are refused."""
        self._discover(self._settings.target, self.targets, self._link_target)
        await self.targets.wait_until_judged(math.inf)
        if self.targets.model is None:
            raise StartupError(self.targets.refusal)
        assert self._model is not None
        assert self._tokenizer is not None
        return self._model, self._tokenizer

    async def connect_drafts(self) -> None:
        """Wait for a draft for a while. Raises StartupError if all of them are refused."""
        if not self._settings.draft:
            self.drafts.add(RemoteWorker("DRAFT_NOT_CONFIGURED"))
            return
        self._discover(self._settings.draft, self.drafts, self._link_draft)
        if not await self.drafts.wait_until_judged(self._settings.draft_startup_seconds):
            log.warning("the draft worker does not answer: serving with the target alone", address=self._settings.draft)
        elif self.drafts.model is None:
            raise StartupError(self.drafts.refusal)
        if self._settings.canary_draft:
            self._connect_canary()

    def _connect_canary(self) -> None:
        """Link the canary's workers. Nothing waits for them, and a refused one ends nothing."""
        workers = Workers[DraftStream](fault="DRAFT_UNAVAILABLE")
        self.canary = canary = Canary(self.drafts, workers, self._settings.canary_share)
        discovery = self._discover(self._settings.canary_draft, workers, partial(self._link_draft, is_canary=True))

        async def dismiss() -> None:
            await asyncio.sleep(self._settings.draft_timeout_seconds)  # of the last proposals
            await discovery.close()

        def on_taken_back() -> None:
            self._dismissing = asyncio.ensure_future(dismiss())

        canary.on_taken_back = on_taken_back
        for state in CanaryState:
            self._metrics.show("canary_state", partial(canary.has_state, state), state.value)
        self._metrics.show("canary_rounds", lambda: canary.judgement.num_rounds)

    def _discover(
        self, addresses: str, workers: Workers[Stream], link: Callable[[str], WorkerLink[Any]]
    ) -> Discovery[Any]:
        discovery = Discovery(split_addresses(addresses), workers, link)
        self._connections.push_async_callback(discovery.close)
        return discovery

    def _link_target(self, address: str) -> WorkerLink[GrpcTargetStream]:
        async def on_change(ready: bool) -> None:
            self._metrics.show_worker("target", self.targets.model)
            if not self._settings.draft:
                own = self.targets.first.self_draft if self.targets.model is not None else None
                self._metrics.show_worker("draft", own.model if own is not None else None)
            if self.on_change is not None:
                await self.on_change()

        return WorkerLink(
            WorkerConnection("target", address, self._certificates),
            calls=verify_calls(),
            open_stream=GrpcTargetStream,
            accept=self._accept_target,
            on_change=on_change,
            keeps_model=True,
        )

    def _link_draft(self, address: str, *, is_canary: bool = False) -> WorkerLink[GrpcDraftStream]:
        async def on_change(ready: bool) -> None:
            draft = self.canary.drafts[self.canary.leads].workers if self.canary is not None else self.drafts
            self._metrics.show_worker("draft", draft.model)
            if is_canary and link.refusal:
                log.warning(
                    "the canary draft is refused, the present one serves all", address=address, why=link.refusal
                )
            if is_canary and self.on_change is not None:
                await self.on_change()

        link = WorkerLink(
            WorkerConnection("draft", address, self._certificates),
            calls=propose_calls(),
            open_stream=GrpcDraftStream,
            accept=self._accept_draft,
            on_change=on_change,
        )
        return link

    async def _accept_target(self, model: ModelInfo, link: WorkerLink[GrpcTargetStream]) -> None:
        async with self._fetching:
            if self._model is None:
                tokenizer = await link.fetch_tokenizer(model.short_name)
                if model.vocabulary_size > tokenizer.vocabulary_size:
                    raise ValueError(
                        f"{model.vocabulary_size} tokens, and its tokenizer has {tokenizer.vocabulary_size}"
                    )
                self._model, self._tokenizer = model, tokenizer
        if not model.decodes_like(self._model):
            raise RefusedModelError(
                f"the target worker at {link.address} now serves {model.name}, but the sessions here are those of "
                f"{self._model.name}, with other weights or another tokenizer, or with other adapters: restart the "
                "coordinator"
            )
        for other in self.targets.ready:
            if other is not link and other.life.incarnation == link.incarnation:
                raise RefusedModelError(
                    f"the target worker at {link.address} is the one at {other.address}: name each worker once"
                )
        if not model.whole_fingerprint:
            return
        address, fingerprint = self._certain = self._certain or (link.address, model.whole_fingerprint)
        if fingerprint != model.whole_fingerprint:
            then = "before" if address == link.address else f"the one at {address}"
            raise RefusedModelError(
                f"the target worker at {link.address} serves {model.name} with other weights than {then}, though they "
                "look the same at first sight: restart the coordinator"
            )

    async def _accept_draft(self, model: ModelInfo, link: WorkerLink[GrpcDraftStream]) -> None:
        target, tokenizer = self._model, self._tokenizer
        assert target is not None
        assert tokenizer is not None
        if conflict := encoder_conflict(target, model):
            raise RefusedModelError(conflict)
        if model.vocabulary_fingerprint != target.vocabulary_fingerprint:
            difference = tokenizer.difference(await link.fetch_tokenizer())
            raise RefusedModelError(tokenizer_conflict(target, model, difference))
