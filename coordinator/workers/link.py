"""The link to one worker: its presence, and its model.

A target that comes back is used only if its whole fingerprint is known and the same as before, so that no session has
tokens of two models. If an earlier life ended before its fingerprint was known, its sessions end (TARGET_REPLACED), and
new ones begin. The draft's fingerprint does not matter, because the draft decides no token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.core import SessionSetup
from coordinator.workers.connection import DESCRIBE_SECONDS, WorkerConnection, describe
from coordinator.workers.description import check_description
from coordinator.workers.errors import RefusedModelError
from coordinator.workers.remote_worker import RemoteWorker, TargetDraft, WorkerLife
from coordinator.workers.session_calls import SessionCalls
from specd.cache_footprint import CacheFootprint
from specd.model_info import MAX_TOKENIZER_BYTES, ModelInfo
from specd.protocol import ProtocolMismatchError, check_protocol_of
from specd.rpc.diagnosis import why_unreachable
from specd.rpc.messages import footprint_from, model_from, step_costs_from
from specd.text.chat import ChatTemplate
from specd.text.tokenizer import Tokenizer
from specd.v1 import model_pb2, model_pb2_grpc

log = structlog.get_logger()

_REMIND_SECONDS = 10.0
_RETRY_SECONDS = 0.05
_MOST_CHARACTERS = 500  # in an error
_MOST_CONFIG_BYTES = 2 * 2**20  # in a chat template and the special tokens

Stream = TypeVar("Stream")


class WorkerLink(RemoteWorker[Stream]):
    """A worker over gRPC, watched for the life of the coordinator.

    Its health stream breaks within milliseconds of its death. When the worker is back, its model is checked again,
    because it can be another one.
    """

    def __init__(
        self,
        connection: WorkerConnection,
        *,
        calls: SessionCalls,
        open_stream: Callable[[Any, SessionSetup, str], Stream],
        accept: Callable[[ModelInfo, WorkerLink[Stream]], Awaitable[None]],
        on_change: Callable[[bool], Awaitable[None]],
        keeps_model: bool = False,
    ) -> None:
        """Use a connection to a worker; `open_stream` makes a stream of one of its `calls`.

        `accept` raises RefusedModelError to refuse its model.

        With `keeps_model`, every life of the worker must have the same weights as the previous one, to the last byte.
        """
        super().__init__(f"{connection.worker.upper()}_UNAVAILABLE", address=connection.address)
        self.worker = connection.worker
        self._connection = connection
        self._why = "it has not answered yet"
        self.incarnation = ""  # of the process that is being judged
        self._calls = calls
        self._multiplexes = False
        self._open_stream = open_stream
        self._accept = accept
        self._on_change = on_change
        self._following: asyncio.Future[None] | None = None
        self._keeps_model = keeps_model
        self._learning: asyncio.Future[None] | None = None
        self._watching = asyncio.ensure_future(self._watch())

    def open_stream(self, setup: SessionSetup) -> Stream:
        """Open a stream for a session, on the one channel."""
        call = self._calls.open(self._connection.channel, setup, multiplexes=self._multiplexes)
        return self._open_stream(call, setup, self.life.incarnation)

    async def fetch_tokenizer(self, model_name: str = "") -> Tokenizer:
        """Get the tokenizer and chat template of the worker's model; errors of the template name the model."""
        stub = model_pb2_grpc.ModelServiceStub(self._connection.channel)
        call = stub.GetTokenizer(model_pb2.GetTokenizerRequest(), timeout=DESCRIBE_SECONDS)
        config, data = model_pb2.TokenizerConfig(), bytearray()
        async for response in call:
            if not data:
                config = response.config
            data += response.chunk
            if len(data) > MAX_TOKENIZER_BYTES or config.ByteSize() > _MOST_CONFIG_BYTES:
                raise ValueError("its tokenizer is impossibly large")
        template = ChatTemplate(config.chat_template, dict(config.special_tokens), model_name)
        # Not on the event loop, because some tokenizers take a second.
        return await asyncio.to_thread(_read_tokenizer, bytes(data), template)

    async def close(self) -> None:
        """Stop watching and close the channel, with all streams on it."""
        self._watching.cancel()
        self._stop_learning()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._connection.close()

    async def _watch(self) -> None:
        tasks = [
            asyncio.ensure_future(self._remind()),
            asyncio.ensure_future(self._connection.renew(self._follow_again)),
        ]
        try:
            while True:
                try:
                    self._following = asyncio.ensure_future(self._follow_health())
                    await asyncio.wait({self._following})
                    if self._following.cancelled():
                        continue  # the connection has a new channel
                    self._following.result()
                    self._why = "it ended the health stream"
                except grpc.aio.AioRpcError as error:
                    self._why = error.details() or error.code().name
                except ValueError as error:  # its description is impossible
                    await self._lose_for_a_while(f"its description of itself is impossible: {error}")
                except Exception as error:
                    log.exception("cannot use a worker", worker=self.worker, address=self.address)
                    await self._lose_for_a_while(repr(error))
                await self._lose()
                await asyncio.sleep(_RETRY_SECONDS)
        finally:
            for task in (*tasks, self._following):
                if task is not None:
                    task.cancel()

    def _follow_again(self) -> None:
        if self._following is not None:
            self._following.cancel()

    async def _lose_for_a_while(self, why: str) -> None:
        self._why = why
        log.error("cannot use a worker", worker=self.worker, address=self.address, why=why)
        await self._lose()
        await asyncio.sleep(_REMIND_SECONDS)

    async def _follow_health(self) -> None:
        health = health_pb2_grpc.HealthStub(self._connection.channel)
        request = health_pb2.HealthCheckRequest(service=f"specd.v1.{self.worker.capitalize()}Service")
        async for update in health.Watch(request, wait_for_ready=True):  # type: ignore[attr-defined]
            if update.status == health_pb2.HealthCheckResponse.SERVING:
                await self._check_model()
                await asyncio.sleep(_RETRY_SECONDS)  # a process that repeats this answer must not cost much
            elif update.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
                await self._refuse(f"the process at {self.address} is not a {self.worker} worker")
            else:
                self._why = "it is loading or stopping"
                await self._lose()

    async def _check_model(self) -> None:
        self._stop_learning()
        response = await describe(self._connection.channel)
        must_match = self.life.whole_fingerprint if self._keeps_model else ""
        if must_match and not response.model.whole_fingerprint:
            self._why = "its weights are not known yet"
            await self._lose()
            response = await describe(self._connection.channel, wait_for_whole_fingerprint=True)
        try:
            check_protocol_of(f"the {self.worker} worker at {self.address}", response.version, response.protocol)
        except ProtocolMismatchError as error:
            await self._refuse(str(error))
            return
        model, footprint = model_from(response.model), footprint_from(response)
        check_description(model, footprint, response.incarnation, response.kernel_class)
        step_costs, self_draft = step_costs_from(response.step_costs), _self_draft_from(response)
        self.incarnation = response.incarnation
        try:
            await self._accept(model, self)
            if must_match not in {"", model.whole_fingerprint}:
                raise RefusedModelError(
                    f"the {self.worker} worker at {self.address} serves {model.name} with other weights than before, "
                    "though they look the same at first sight: restart the coordinator"
                )
        except RefusedModelError as error:
            await self._refuse(str(error))
            return
        self.cache_bytes, self.footprint, self.step_costs = response.cache_capacity_bytes, footprint, step_costs
        self.self_draft, self._multiplexes = self_draft, response.multiplexes
        self.prefix_cache_tokens = response.prefix_cache_bytes // max(footprint.bytes_for(1), 1)
        self.life = WorkerLife(response.incarnation, model.whole_fingerprint, response.kernel_class)
        log.info(
            "connected",
            worker=self.worker,
            address=self.address,
            model=model.name,
            device=model.device,
            version=response.version,
        )
        await self._become(model)
        if self._keeps_model and not model.whole_fingerprint:
            self._learning = asyncio.ensure_future(self._learn_fingerprint(self.life))

    async def _learn_fingerprint(self, life: WorkerLife) -> None:
        """Wait until the worker has digested its model, to recognise it when it comes back."""
        while not life.whole_fingerprint:
            try:
                response = await describe(self._connection.channel, wait_for_whole_fingerprint=True)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(_REMIND_SECONDS)
                continue
            if response.incarnation != life.incarnation or not response.model.whole_fingerprint:
                return
            life.whole_fingerprint = response.model.whole_fingerprint
        if self.life is life and self.model is not None:
            self.model = replace(self.model, whole_fingerprint=life.whole_fingerprint)
            try:
                await self._accept(self.model, self)
            except RefusedModelError as error:
                await self._refuse(str(error))

    def _stop_learning(self) -> None:
        if self._learning is not None:
            self._learning.cancel()
            self._learning = None

    async def _refuse(self, why: str) -> None:
        log.error("refused a worker", worker=self.worker, address=self.address, error=why)
        await self._become(None, why)

    async def _lose(self) -> None:
        if self.model is not None or self.refusal:
            log.warning("lost a worker", worker=self.worker, address=self.address, why=self._why)
            await self._become(None)

    async def _become(self, model: ModelInfo | None, refusal: str = "") -> None:
        self.model, self.refusal = model, refusal
        what = "REFUSED" if refusal else "UNAVAILABLE"
        self.fault = "" if model is not None else f"{self.worker.upper()}_{what}"
        self.changes.notify()
        await self._on_change(model is not None)

    @property
    def _is_away(self) -> bool:
        return self.model is None and not self.refusal

    async def _remind(self) -> None:
        while True:
            why = (
                await asyncio.to_thread(why_unreachable, self.address, self._connection.credentials)
                if self._is_away
                else ""
            )
            if self._is_away:  # after the pause too
                why = why or self._why
                log.info("waiting for a worker", worker=self.worker, address=self.address, why=why)
            await asyncio.sleep(_REMIND_SECONDS)


def _self_draft_from(response: model_pb2.DescribeResponse) -> TargetDraft | None:
    """Return what a target proposes tokens with, if it does. Raises ValueError for an impossible one."""
    if not response.HasField("self_draft"):
        return None
    model = model_from(response.self_draft.model)
    check_description(model, CacheFootprint({1: 1}), response.incarnation)
    return TargetDraft(model, step_costs_from(response.self_draft.step_costs))


def _read_tokenizer(data: bytes, template: ChatTemplate) -> Tokenizer:
    """Return a tokenizer from its bytes. Raises ValueError."""
    try:
        return Tokenizer(data, template)
    except BaseException as error:  # a panic of the library is not an Exception
        raise ValueError(f"its tokenizer cannot be read: {error}"[:_MOST_CHARACTERS]) from error
