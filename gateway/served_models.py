"""The models that are served, as the gateway remembers them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.http.endpoint import Requester
from gateway.http.errors import ApiError
from gateway.http.notice import Notice
from gateway.model_choice import ModelChoice
from gateway.served_model import KnownModel, ModelCard, fingerprint_of
from gateway.wording import to_api_error
from specd.client import AsyncClient, ModelStatus, ServiceDescription
from specd.errors import SpecdError
from specd.model_info import ModelInfo

_FRESH_SECONDS = 5.0
_CALL_SECONDS = 5.0
_PROGRESS_SECONDS = 1.0
UNAUTHENTICATED = 401


@dataclass(frozen=True)
class ListedModel:
    """A model in the list of all models, and its state, which one alone does not have."""

    card: ModelCard
    status: ModelStatus | None = None


@dataclass(frozen=True)
class _Described:
    """A model, and when it was asked for."""

    model: KnownModel
    asked_at: float


class ServedModels:
    """Remembers the models, so that a request does not wait for their description.

    A coordinator that serves one target with its adapters serves other ones after a restart at most. So its description
    is renewed after some seconds beside the request that finds it old, and before the request after an error.

    Another coordinator serves several targets, and loads them on demand. The description of each is renewed after some
    seconds before the request that finds it old, because another model can have the same name by then.
    """

    def __init__(
        self,
        client: AsyncClient,
        *,
        asks_for_tokens: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `asks_for_tokens`, there are no models while the coordinator serves who has none."""
        self._client = client
        self._asks_for_tokens = asks_for_tokens
        self._clock = clock
        self._has_several = False
        self._described: dict[str, _Described] = {}  # if there are several; "" is the default one
        self._served: list[KnownModel] = []  # if there is one: the target, then its adapters
        self._asked_at = 0.0
        self._renewing: asyncio.Task[None] | None = None

    async def named(self, choice: ModelChoice, caller: Requester) -> KnownModel:
        """Return the model of a request, once it is loaded. Raises ApiError."""
        return await self.at_once(choice, caller) or await self.loaded(choice, caller, Notice())

    async def at_once(self, choice: ModelChoice, caller: Requester) -> KnownModel | None:
        """Return the model of a request; None if that has to wait until it is loaded. Raises ApiError."""
        if not self._served and not self._has_several:
            await self.check(caller)
        if not self._has_several:
            return await self._of_one(choice.name, caller)
        known = self._described.get(choice.name) if choice.name or not choice.session_id else None
        if known is not None and self._clock() <= known.asked_at + _FRESH_SECONDS:
            return known.model
        if self._asks_for_tokens:
            await self._check_that_strangers_are_refused()
        try:
            return await self._describe(choice, caller, refuse_unloaded=True, timeout_seconds=_CALL_SECONDS)
        except SpecdError as error:
            if error.reason == "MODEL_LOADING" and not (choice.refuses_unloaded or caller.refuses_unloaded):
                return None
            if error.reason == "MODEL_NOT_FOUND":
                raise not_found(choice.name, [each.card for each in await self.list(caller)]) from error
            raise to_api_error(error) from error

    async def loaded(self, choice: ModelChoice, caller: Requester, notice: Notice) -> KnownModel:
        """Wait for a model that is not loaded, with its progress in `notice`. Raises ApiError."""
        notice.say(f"loading {choice.name or 'the model'}")
        watching = asyncio.ensure_future(self._watch(choice, caller, notice))
        try:
            return await self._describe(choice, caller, refuse_unloaded=False, timeout_seconds=None)
        except SpecdError as error:
            raise to_api_error(error) from error
        finally:
            watching.cancel()

    async def list(self, caller: Requester) -> Sequence[ListedModel]:
        """Return all models, each target before its adapters. None is loaded for this. Raises ApiError."""
        statuses = await self.check(caller)
        if not statuses:
            return [ListedModel(known.model) for known in self._served]
        try:
            infos = await self._client.models(token=caller.token, timeout_seconds=_CALL_SECONDS)
        except SpecdError as error:
            raise to_api_error(error) from error
        by_name = {status.name: status for status in statuses}
        return [
            ListedModel(await self._card_of(info, status, caller), status)
            for info in infos
            if (status := by_name.get(info.parent or info.name)) is not None
        ]

    async def check(self, caller: Requester) -> Sequence[ModelStatus]:
        """Return the states of several models, none for one alone. Raises ApiError for a caller that may not ask."""
        try:
            statuses = await self._client.statuses(token=caller.token, timeout_seconds=_CALL_SECONDS)
            service = (
                None if statuses else await self._client.describe(token=caller.token, timeout_seconds=_CALL_SECONDS)
            )
        except SpecdError as error:
            raise to_api_error(error) from error
        if self._asks_for_tokens:
            await self._check_that_strangers_are_refused()
        self._has_several = bool(statuses)
        if service is None:
            self._served = []
            return statuses
        self._described.clear()
        self._asked_at = self._clock()
        cards = ModelCard.all_of(service)
        if [served.model for served in self._served] != cards:
            self._served = [*map(KnownModel, cards)]
        return statuses

    def forget(self) -> None:
        """Forget what is known of the models. The coordinator has failed, and may serve other ones when it is back."""
        self._served = []
        self._described.clear()
        self._has_several = False

    async def _of_one(self, name: str, caller: Requester) -> KnownModel:
        """Return the model of this name, without one the target. Raises ApiError."""
        if self._clock() > self._asked_at + _FRESH_SECONDS and self._renewing is None:
            self._renewing = asyncio.ensure_future(self._renew(caller))
        served = self._served
        if (found := _find(name, served)) is None:
            await self.check(caller)  # there may be other ones by now
            served = self._served or served
            found = _find(name, served)
        if found is None:
            raise not_found(name, [known.model for known in served])
        return found

    async def _describe(
        self, choice: ModelChoice, caller: Requester, *, refuse_unloaded: bool, timeout_seconds: float | None
    ) -> KnownModel:
        """Return one of several models, and remember it. Raises SpecdError."""
        service = await self._client.describe(
            choice.name,
            session_id=choice.session_id,
            refuse_unloaded=refuse_unloaded,
            token=caller.token,
            timeout_seconds=timeout_seconds,
        )
        return self._remember(service, choice)

    def _remember(self, service: ServiceDescription, choice: ModelChoice) -> KnownModel:
        models = []
        for card in ModelCard.all_of(service):
            before = self._described.get(card.model_id)
            models.append(before.model if before is not None and before.model.model == card else KnownModel(card))
            self._described[card.model_id] = _Described(models[-1], self._clock())
        if not choice.name and not choice.session_id:
            self._described[""] = self._described[models[0].model.model_id]
        return _find(choice.name, models) or models[0]

    async def _card_of(self, info: ModelInfo, status: ModelStatus, caller: Requester) -> ModelCard:
        """Return what is known of one of several models. Only one that is loaded is asked, and once."""
        known = self._described.get(info.name)
        if known is not None and known.model.model.system_fingerprint == fingerprint_of(info):
            return known.model.model
        if status.state == "ready":
            choice = ModelChoice(info.name)
            with contextlib.suppress(SpecdError):  # it may have been unloaded by now
                model = await self._describe(choice, caller, refuse_unloaded=True, timeout_seconds=_CALL_SECONDS)
                return model.model
        return ModelCard.listed(info)

    async def _watch(self, choice: ModelChoice, caller: Requester, notice: Notice) -> None:
        """Keep the progress of a model in a notice."""
        while True:
            with contextlib.suppress(SpecdError):
                statuses = await self._client.statuses(token=caller.token, timeout_seconds=_CALL_SECONDS)
                status = await self._status_of(choice, statuses, caller)
                if status is not None:
                    notice.say(f"loading {status.name}{_how(status)}")
            await asyncio.sleep(_PROGRESS_SECONDS)

    async def _status_of(
        self, choice: ModelChoice, statuses: Sequence[ModelStatus], caller: Requester
    ) -> ModelStatus | None:
        """Return the state of the target that a request waits for; None if its session alone knows which that is."""
        if not choice.name:
            return statuses[0] if statuses and not choice.session_id else None
        by_name = {status.name: status for status in statuses}
        if choice.name not in by_name:  # an adapter
            for info in await self._client.models(token=caller.token, timeout_seconds=_CALL_SECONDS):
                by_name.setdefault(info.name, by_name.get(info.parent) or statuses[0])
        return by_name.get(choice.name)

    async def _check_that_strangers_are_refused(self) -> None:
        try:
            await self._client.statuses(token="", timeout_seconds=_CALL_SECONDS)
        except SpecdError as error:
            failure = to_api_error(error)
            if failure.status == UNAUTHENTICATED:
                return
            raise failure from error
        everyone = "everyone could use this gateway: start the coordinator with --tokens, or the gateway with --tls-ca"
        raise ApiError(503, "open_to_everyone", everyone)

    async def _renew(self, caller: Requester) -> None:
        try:
            with contextlib.suppress(ApiError):
                await self.check(caller)
        finally:
            self._renewing = None


def _how(status: ModelStatus) -> str:
    """Return how far a model is that is being loaded, behind its name."""
    if status.state == "waiting":
        return ", waiting for memory"
    return f", {status.loading.words}" if status.loading is not None and status.loading.process else ""


def _find(name: str, models: Sequence[KnownModel]) -> KnownModel | None:
    """Return the model of this name, or None. Without a name, return the first model."""
    if not name:
        return models[0]
    return next((known for known in models if known.model.model_id == name), None)


def not_found(name: str, models: Sequence[ModelCard]) -> ApiError:
    """Return the error of a model that is not served."""
    served = ", ".join(repr(model.model_id) for model in models)
    which = f"the one that is served is {served}" if len(models) == 1 else f"those that are served are {served}"
    return ApiError(404, "model_not_found", f"there is no model {name[:200]!r} here: {which}", param="model")
