"""The models of a coordinator by name: loaded on demand within a budget of memory, and replaced while requests run."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import structlog

from coordinator.models.loader import Loader, LoadProgress
from coordinator.models.served_model import ModelState, ServedModel
from coordinator.models.waiting import Requests, Waiting, starting
from coordinator.sessions.request_counts import RequestCounts
from coordinator.workers.changes import Changes
from specd.caller import Caller
from specd.errors import InternalError, NotFoundError, SpecdError, StartupError, UnavailableError
from specd.model_entries import ModelEntries, ModelEntry

log = structlog.get_logger()

_RETRY_SECONDS = 5.0

NewModel = Callable[[ModelEntry, "ServedModel | None"], ServedModel]


class Models:
    """Loads the models of requests.

    Models are loaded one after another. If the budget is too small for one more, the one that was not used for longest
    is unloaded, once its requests have ended. New requests for it wait until it is loaded again.

    A model with workers that run all the time has no key, and is never unloaded. Requests for it are refused until its
    target is there.
    """

    def __init__(
        self, entries: ModelEntries, new_model: NewModel, loader: Loader, num_requests: RequestCounts | None = None
    ) -> None:
        """`new_model` makes a model from its entry, and from the one that it replaces if there is one.

        `num_requests` counts the requests of each client. Raises StartupError if `new_model` does.
        """
        self._new_model, self._loader = new_model, loader
        self._named = {entry.name: new_model(entry, None) for entry in entries.models}
        self._wanted: dict[str, ServedModel] = {}  # replacements that are still to be loaded, by name
        self._leaving: set[ServedModel] = set()  # those that others have replaced
        self.on_gone: Callable[[str], None] = lambda name: None  # called when a name is no longer served
        self._requests = Requests(RequestCounts() if num_requests is None else num_requests)
        self._budget_bytes: float = entries.budget_bytes or math.inf
        self._turn = asyncio.Lock()
        self._changes = Changes()
        self._has_begun = False
        self._tasks: set[asyncio.Task[None]] = set()
        loader.on_failure = self._fail

    @property
    def all(self) -> list[ServedModel]:
        """The models that requests can name, the default one first."""
        return [*self._named.values()]

    @property
    def present(self) -> list[ServedModel]:
        """The models that are loaded, also those that others have replaced while requests run."""
        return [model for model in (*self._named.values(), *self._leaving) if model.coordinator is not None]

    @property
    def are_serving(self) -> bool:
        """Whether requests can be served: models that can be loaded count."""
        return any(each.entry.key or each.is_connected for each in self.all)

    def facts(self) -> dict[str, str]:
        """Name the models, for logs."""
        only = self._named.get("")
        if only is not None and only.coordinator is not None:
            return only.coordinator.model_names()
        return {"models": ", ".join(each.name for each in self.all)}

    async def begin(self, patience_seconds: float = 0.0) -> None:
        """Load the pinned models, and connect to those that are loaded already. Raises StartupError.

        It waits until one of them serves, and then for this time for others that run all the time.
        """
        for model in self.all:
            if model.name:
                await model.sessions.recall()
        running = await self._loader.running() if any(each.entry.key for each in self.all) else set()
        self._start_standing()
        connecting = {model.loading for model in self.all if model.loading is not None}
        for model in self.all:
            if model.entry.key and (model.entry.pinned or model.entry.key in running):
                try:
                    await self._load(model)
                except SpecdError as error:
                    raise StartupError(f"the model {model.name} cannot be loaded: {error}") from error
        while connecting:
            seconds = patience_seconds if self.are_serving else None
            done, connecting = await asyncio.wait(connecting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not task.cancelled():  # the file of models has been read again
                    task.result()
            if not done:
                break
        self._has_begun = True

    @asynccontextmanager
    async def using(self, model: ServedModel, caller: Caller, *, waits: bool = True) -> AsyncIterator[Waiting]:
        """Use a model for a client's request, which waits for it; it is not unloaded before the end.

        Without `waits`, raises UnavailableError (MODEL_LOADING) if it is not loaded, and loads it.
        """
        waiting = Waiting(model, caller, self.progress_of)
        try:
            self._enter(waiting, waits=waits)
            yield waiting
        finally:
            self._requests.leave(waiting)
            self._changes.notify()

    def replace(self, entries: ModelEntries) -> None:
        """Serve these models from now on. One that has changed serves until its replacement is loaded."""
        self._budget_bytes = entries.budget_bytes or math.inf
        named: dict[str, ServedModel] = {}
        for entry in entries.models:
            before, wanted = self._named.pop(entry.name, None), self._wanted.get(entry.name)
            if before is None:
                named[entry.name] = self._new_model(entry, None)
            elif wanted is not None and wanted.entry.has_workers_of(entry):
                wanted.entry = entry
                named[entry.name] = before
            else:
                named[entry.name] = self._replaced(before, entry)
        gone, self._named = self._named, named
        for model in gone.values():
            self._stop_connecting(model)
            self._stop_connecting(self._wanted.pop(model.name, None))
            unserved = NotFoundError("MODEL_NOT_FOUND", f"the model {model.name!r} is no longer served")
            self._requests.refuse(model, unserved)
            self._do(self._retire(model))
        for model in self.all:
            if model.entry.pinned and model.state is ModelState.UNLOADED:
                self._start(model)
        self._start_standing()

    def _replaced(self, before: ServedModel, entry: ModelEntry) -> ServedModel:
        """Return the model that serves for an entry from now on: `before` until another one is loaded."""
        self._stop_connecting(self._wanted.pop(before.name, None))
        if before.entry.has_workers_of(entry):
            before.entry = entry
            return before
        is_unloaded = before.state is ModelState.UNLOADED and before.loading is None
        if is_unloaded or not (before.entry.key or before.state is ModelState.READY):
            self._stop_connecting(before)
            return self._new_model(entry, before)
        self._wanted[entry.name] = after = self._new_model(entry, before)
        if entry.key:
            self._do(self._swap(entry.name))
        else:
            after.loading = self._do(self._move(before, after))
        return before

    def _stop_connecting(self, model: ServedModel | None) -> None:
        """Stop waiting for workers that run all the time."""
        if model is not None and model.loading is not None and not model.entry.key:
            model.loading.cancel()

    def review(self) -> None:
        """Unload the models that were idle for too long."""
        for model in self.all:
            is_idle = model.state is ModelState.READY and not model.num_users and not model.entry.pinned
            if is_idle and model.entry.key and time.monotonic() > model.last_used_at + model.entry.idle_seconds:
                model.state = ModelState.LEAVING
                self._do(self._unload(model, "it was idle"))

    async def close(self) -> None:
        """Leave all workers, and finish all writes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for model in {*self.all, *self._leaving}:
            await model.close()
        for sessions in {model.sessions for model in (*self.all, *self._leaving)}:
            await sessions.close()

    def _enter(self, waiting: Waiting, *, waits: bool) -> None:
        model = waiting.model
        if model.state is ModelState.READY:
            self._requests.admit(waiting)
            return
        if not model.entry.key:
            raise starting(model.name)
        self._requests.check_room(model, waiting.caller)
        self._start(model)
        if not waits:
            raise UnavailableError(
                "MODEL_LOADING",
                f"the model {model.name!r} is not loaded: it begins to load",
                retry_after_seconds=_RETRY_SECONDS,
            )
        self._requests.wait(waiting)

    def _start(self, model: ServedModel) -> None:
        """Begin to load a model, unless that has begun."""
        if model.loading is None:
            model.loading = self._do(self._load_for_requests(model))

    def _start_standing(self) -> None:
        """Begin to connect to the models that run all the time."""
        for model in self.all:
            if not model.entry.key and model.state is ModelState.UNLOADED and model.loading is None:
                model.loading = self._do(self._connect(model))

    async def _connect(self, model: ServedModel) -> None:
        """Connect to workers that run all the time. After the start, ask again after an error."""
        try:
            while True:
                try:
                    return await self._open(model)
                except Exception as error:  # a fault of ours must not end the attempts
                    if not self._has_begun:
                        raise
                    model.report("a model cannot be served", error)
                await asyncio.sleep(_RETRY_SECONDS)
        finally:
            model.loading = None

    async def _load_for_requests(self, model: ServedModel) -> None:
        try:
            await self._load(model)
        except Exception as error:  # after a fault of ours, requests must not wait for nothing
            model.report("a model cannot be loaded", error)
            refusal: SpecdError = InternalError("INTERNAL", f"the model {model.name!r} cannot be loaded: see the log")
            if isinstance(error, SpecdError):
                refusal = error
            elif isinstance(error, StartupError):
                refusal = UnavailableError("MODEL_NOT_LOADED", str(error))
            self._requests.refuse(model, refusal)
        finally:
            model.loading = None

    async def _load(self, model: ServedModel) -> None:
        """Load a model, and let the requests that wait for it run. Raises UnavailableError and StartupError."""
        async with self._turn:
            await self._until(lambda: model.state in {ModelState.UNLOADED, ModelState.READY})  # it may be leaving
            if self._named.get(model.name) is not model:
                return  # the requests that waited for it have another one
            if model.state is ModelState.READY:
                self._requests.admit_all(model, model)
                return
            began_at = time.monotonic()
            await self._open(model)
            if model.name:
                log.info("a model is loaded", model=model.name, seconds=round(time.monotonic() - began_at, 2))
            self._requests.admit_all(model, model)
            self._changes.notify()

    async def _open(self, model: ServedModel, *kept: ServedModel) -> None:
        """Have a model's workers started, and connect to them; unload others for that, but not those that are kept.

        Raises UnavailableError and StartupError, after which nothing of the model is loaded.
        """
        model.state = ModelState.WAITING
        try:
            if model.entry.key:
                await self._make_room(model, *kept)
            model.state = ModelState.LOADING
            if model.entry.key:
                await self._loader.load(model.entry.key)
            try:
                await model.open()
            except Exception:
                if model.entry.key:
                    await self._loader.unload(model.entry.key)
                raise
        except BaseException:
            model.state = ModelState.UNLOADED
            self._changes.notify()
            raise
        model.state, model.last_used_at = ModelState.READY, time.monotonic()

    async def _make_room(self, model: ServedModel, *kept: ServedModel) -> None:
        """Unload other models until the budget has room for one more."""

        def has_room() -> bool:
            return self._used_bytes() + model.entry.num_bytes <= self._budget_bytes

        def others() -> list[ServedModel]:
            ready = (each for each in self.all if each.state is ModelState.READY and each.entry.key)
            return [each for each in ready if each not in kept and not each.entry.pinned]

        while True:
            await self._until(lambda: has_room() or bool(others()))
            if has_room():
                return
            leaving = min(others(), key=lambda each: (each.num_users > 0, each.last_used_at))
            leaving.state = ModelState.LEAVING
            await self._unload(leaving, f"{model.name} needs its memory")

    def _used_bytes(self) -> int:
        """Return the memory of the models that have workers."""
        states = (ModelState.LOADING, ModelState.READY, ModelState.LEAVING)
        return sum(each.entry.num_bytes for each in {*self.all, *self._leaving} if each.state in states)

    async def _unload(self, model: ServedModel, why: str) -> None:
        """Unload a model that is leaving, once its requests have ended."""
        await self._until(lambda: model.num_users == 0)
        await model.close()
        if model.entry.key:
            await self._loader.unload(model.entry.key)
        model.state = ModelState.UNLOADED
        log.info("a model is unloaded", model=model.name, why=why)
        self._changes.notify()

    async def _swap(self, name: str) -> None:
        """Load the wanted replacement of a model, which serves until then if the budget has room for both."""
        began_at = time.monotonic()
        async with self._turn:
            before, after = self._named.get(name), self._wanted.get(name)
            if before is None or after is None:
                return  # an earlier swap has done it, or it is no longer wanted
            await self._until(lambda: before.state in {ModelState.READY, ModelState.UNLOADED})
            self._leaving.add(after)  # its memory counts
            try:
                others = sum(each.entry.num_bytes for each in self.all if each.entry.pinned and each is not before)
                both = before.entry.num_bytes + after.entry.num_bytes
                if before.state is ModelState.READY and others + both > self._budget_bytes:
                    before.state = ModelState.LEAVING
                    await self._unload(before, "its replacement needs its memory")
                await self._open(after, before)
            except Exception as error:
                self._leaving.discard(after)
                if self._wanted.get(name) is after:
                    del self._wanted[name]
                after.report("a model cannot be replaced, and stays", error)
                return
            if self._wanted.get(name) is after:
                del self._wanted[name]
                self._leaving.discard(after)
                self._serve_with(before, after, began_at)
                leaving = before
            else:  # it is no longer wanted
                leaving = after
            self._changes.notify()
        await self._retire(leaving)

    async def _move(self, before: ServedModel, after: ServedModel) -> None:
        """Connect to other workers that run all the time, and then serve with them. To cancel it is safe."""
        began_at = time.monotonic()
        try:
            await self._open(after)
        except Exception as error:
            after.report("a model cannot be replaced, and stays", error)
            return
        finally:
            after.loading = None
            if self._wanted.get(after.name) is after:
                del self._wanted[after.name]
        self._serve_with(before, after, began_at)
        await self._retire(before)

    def _serve_with(self, before: ServedModel, after: ServedModel, began_at: float) -> None:
        self._named[after.name] = after
        self._requests.admit_all(before, after)
        log.info("a model is replaced", model=after.name, seconds=round(time.monotonic() - began_at, 2))

    async def _retire(self, model: ServedModel) -> None:
        """End a model that is no longer named, once its requests have ended."""
        self._leaving.add(model)
        await self._until(lambda: model.state in {ModelState.READY, ModelState.UNLOADED})
        if model.state is ModelState.READY:
            model.state = ModelState.LEAVING
            await self._unload(model, "it was replaced")
        self._leaving.discard(model)
        if model.name not in self._named:
            self.on_gone(model.name)

    def _fail(self, key: str, reason: str) -> None:
        """Take the end of workers that had been loaded."""
        for model in self.present:
            if model.entry.key == key and model.state is ModelState.READY:
                log.error("a model has lost its workers", model=model.name, reason=reason)
                model.state = ModelState.LEAVING
                self._do(self._unload(model, "it has lost its workers"))

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _until(self, condition: Callable[[], bool]) -> None:
        await self._changes.wait_until(condition, math.inf)

    def progress_of(self, model: ServedModel) -> LoadProgress:
        """Return how far the start of a model is."""
        return self._loader.progress(model.entry.key)
