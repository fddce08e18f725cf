"""The coordinator's connection to one worker: whether it is there, and which model it holds."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields
from typing import Generic, TypeVar

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.chat import ChatTemplate
from coordinator.tokenizer import Tokenizer
from specd.channel import open_channel
from specd.model_info import ModelInfo
from specd.sampling import Sampling
from specd.step_costs import StepCosts
from specd.v1 import model_pb2, model_pb2_grpc

log = structlog.get_logger()

_REMIND_SECONDS = 10.0
_RETRY_SECONDS = 0.05
_DESCRIBE_SECONDS = 10.0

Stream = TypeVar("Stream")


class RefusedModelError(Exception):
    """A worker holds a model that the coordinator cannot use; the message names it and says why."""


class WorkerLink(Generic[Stream]):
    """Watches one worker for the life of the coordinator.

    The worker's health stream tells within milliseconds when it dies, and when it is back its model is looked at anew,
    because it can come back with another. `model` is set exactly while the worker is there and its model is accepted.
    """

    def __init__(
        self,
        worker: str,
        address: str,
        *,
        open_stream: Callable[[grpc.aio.Channel, str, Sampling], Stream],
        accept: Callable[[ModelInfo, WorkerLink[Stream]], Awaitable[None]],
        on_change: Callable[[bool], Awaitable[None]],
    ) -> None:
        """Connect to the "draft" or "target" worker; `accept` raises RefusedModelError to refuse its model."""
        self.worker = worker
        self.address = address
        self.model: ModelInfo | None = None
        self.fault = f"{worker.upper()}_UNAVAILABLE"
        self.refusal = ""
        self.capacity_tokens = 0
        self.step_costs: StepCosts | None = None
        self._why = "it has not answered yet"
        self._channel = open_channel(address)
        self._open_stream = open_stream
        self._accept = accept
        self._on_change = on_change
        self._changed = asyncio.Event()
        self._watching = asyncio.ensure_future(self._watch())

    def open_stream(self, session_id: str, sampling: Sampling) -> Stream:
        """Open a stream for a session; if the worker is away, using it fails."""
        return self._open_stream(self._channel, session_id, sampling)

    async def wait_until_ready(self, timeout_seconds: float) -> bool:
        """Wait until the worker is there with a model that fits; return whether it is."""
        return await self._wait_for(lambda: self.model is not None, timeout_seconds)

    async def wait_until_judged(self, timeout_seconds: float) -> bool:
        """Wait until the worker is there and its model accepted or refused; return whether it is."""
        return await self._wait_for(lambda: self.model is not None or bool(self.refusal), timeout_seconds)

    async def fetch_tokenizer(self, model_name: str = "") -> Tokenizer:
        """Get the tokenizer and the chat template of the worker's model, which errors of the template will name."""
        stub = model_pb2_grpc.ModelServiceStub(self._channel)
        call = stub.GetTokenizer(model_pb2.GetTokenizerRequest(), timeout=_DESCRIBE_SECONDS)
        responses = [response async for response in call]
        config = responses[0].config if responses else model_pb2.TokenizerConfig()
        template = ChatTemplate(config.chat_template, dict(config.special_tokens), model_name)
        return Tokenizer(b"".join(response.chunk for response in responses), template)

    async def close(self) -> None:
        """Stop watching and close the channel, with all streams on it."""
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._channel.close()

    async def _wait_for(self, condition: Callable[[], bool], timeout_seconds: float) -> bool:
        try:
            async with asyncio.timeout(timeout_seconds if timeout_seconds < math.inf else None):
                while not condition():
                    await self._changed.wait()
        except TimeoutError:
            return condition()
        return True

    async def _watch(self) -> None:
        reminder = asyncio.ensure_future(self._remind())
        try:
            while True:
                try:
                    await self._follow_health()
                    self._why = "it ended the health stream"
                except grpc.aio.AioRpcError as error:
                    self._why = error.details() or error.code().name
                except Exception as error:
                    self._why = repr(error)
                    log.exception("cannot use a worker", worker=self.worker, address=self.address)
                    await asyncio.sleep(_REMIND_SECONDS)
                await self._lose()
                await asyncio.sleep(_RETRY_SECONDS)
        finally:
            reminder.cancel()

    async def _follow_health(self) -> None:
        health = health_pb2_grpc.HealthStub(self._channel)
        request = health_pb2.HealthCheckRequest(service=f"specd.v1.{self.worker.capitalize()}Service")
        async for update in health.Watch(request, wait_for_ready=True):  # type: ignore[attr-defined]
            if update.status == health_pb2.HealthCheckResponse.SERVING:
                await self._look_at_model()
            elif update.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
                await self._refuse(f"the process at {self.address} is no {self.worker} worker")
            else:
                self._why = "it is loading or stopping"
                await self._lose()

    async def _look_at_model(self) -> None:
        stub = model_pb2_grpc.ModelServiceStub(self._channel)
        response = await stub.Describe(model_pb2.DescribeRequest(), timeout=_DESCRIBE_SECONDS)
        values = {field.name: getattr(response.model, field.name) for field in fields(ModelInfo)}
        model = ModelInfo(**{**values, "eos_token_ids": tuple(response.model.eos_token_ids)})
        try:
            await self._accept(model, self)
        except RefusedModelError as error:
            await self._refuse(str(error))
            return
        self.model, self.refusal, self.fault = model, "", ""
        self.capacity_tokens = response.cache_capacity_tokens
        self.step_costs = _step_costs(response.step_costs)
        log.info("connected", worker=self.worker, address=self.address, model=model.name, device=model.device)
        await self._notify()

    async def _refuse(self, why: str) -> None:
        self.model, self.refusal, self.fault = None, why, f"{self.worker.upper()}_REFUSED"
        log.error("refused a worker", worker=self.worker, address=self.address, error=why)
        await self._notify()

    async def _lose(self) -> None:
        if self.model is None and not self.refusal:
            return
        log.warning("lost a worker", worker=self.worker, address=self.address, why=self._why)
        self.model, self.refusal, self.fault = None, "", f"{self.worker.upper()}_UNAVAILABLE"
        await self._notify()

    async def _notify(self) -> None:
        self._changed.set()
        self._changed.clear()
        await self._on_change(self.model is not None)

    async def _remind(self) -> None:
        while True:
            if self.model is None and not self.refusal:
                log.info("waiting for a worker", worker=self.worker, address=self.address, why=self._why)
            await asyncio.sleep(_REMIND_SECONDS)


def _step_costs(messages: Sequence[model_pb2.StepCost]) -> StepCosts | None:
    measured: dict[int, dict[int, float]] = {}
    for message in messages:
        if message.seconds > 0:
            measured.setdefault(message.sessions, {})[message.width] = message.seconds
    return StepCosts(measured) if measured else None
