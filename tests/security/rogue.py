"""A worker that lies: it stands before a real one, and changes what that one says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from specd.child import Child
from specd.rpc.channel import open_channel
from specd.rpc.messages import INCARNATION
from specd.rpc.multiplex_service import MultiplexService
from specd.v1 import (
    draft_pb2,
    draft_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    multiplex_pb2_grpc,
    target_pb2,
    target_pb2_grpc,
)
from tests.e2e.processes import RunningSpecd, start_specd
from tests.raw_client import RawClient

Context = Any
# Turns an answer into what is sent in its place, one message after the other; may raise, wait or never end.
Lie = Callable[[Any], AsyncIterator[Any]]

_DRAFT = "specd.v1.DraftService"
_TARGET = "specd.v1.TargetService"


async def truth(answer: Any) -> AsyncIterator[Any]:
    """Answer like the real worker."""
    yield answer


class Rogue(model_pb2_grpc.ModelServiceServicer):
    """A draft or target worker before a real one; `lie` is about answers, `describe` about itself.

    With `lies_once`, only the next stream is lied to, of its life too.
    """

    def __init__(self, worker: str, real: Child, address: str) -> None:
        self.address = address
        self.lie: Lie = truth
        self.lies_once = False
        self.describe: Callable[[model_pb2.DescribeResponse], object] = lambda _: None
        self.tokenizer: Callable[[model_pb2.GetTokenizerResponse], list[Any]] = lambda response: [response]
        self.incarnation = ""  # the real one's
        self._real_incarnation = ""
        self._is_draft = worker == "draft"
        self._channel = open_channel(real.facts["address"])
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(self, self._server)
        if self._is_draft:
            draft_pb2_grpc.add_DraftServiceServicer_to_server(_Draft(self), self._server)
            parse: Any = draft_pb2.ProposeRequest.FromString
        else:
            target_pb2_grpc.add_TargetServiceServicer_to_server(_Target(self), self._server)
            parse = target_pb2.VerifyRequest.FromString
        multiplexing = _Multiplexing(lambda: self.incarnation or self._real_incarnation, self.serve, parse)
        self._shared_calls = multiplexing.calls
        multiplex_pb2_grpc.add_MultiplexServiceServicer_to_server(multiplexing, self._server)
        self._server.add_insecure_port(address)

    async def __aenter__(self) -> Rogue:
        await self._server.start()
        await self.set_serving(True)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._server.stop(None)
        await self._channel.close()

    async def set_serving(self, serving: bool) -> None:
        """Notify the watchers, which ask for the description again when the worker serves again."""
        status = health_pb2.HealthCheckResponse
        name = _DRAFT if self._is_draft else _TARGET
        await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def sessions_ended(self) -> None:
        """Wait until no call that sessions share is open: later sessions get another one, of the life as it is now."""
        while self._shared_calls:  # noqa: ASYNC110 - a call raises no event
            await asyncio.sleep(0.01)

    async def Describe(self, request: Any, context: Context) -> Any:
        """Describe the real worker, with changes."""
        response = await model_pb2_grpc.ModelServiceStub(self._channel).Describe(request)
        self._real_incarnation = response.incarnation
        self.describe(response)
        return response

    async def GetTokenizer(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """Send the real worker's tokenizer, with changes."""
        async for response in model_pb2_grpc.ModelServiceStub(self._channel).GetTokenizer(request):
            for changed in self.tokenizer(response):
                yield changed

    async def serve(self, context: Context) -> None:
        """Pass requests on, and answers changed."""
        lie, incarnation = self.lie, self.incarnation
        if self.lies_once:
            self.lie, self.incarnation, self.lies_once = truth, "", False
        stub = draft_pb2_grpc.DraftServiceStub(self._channel) if self._is_draft else None
        call: Any = stub.Propose() if stub else target_pb2_grpc.TargetServiceStub(self._channel).Verify()
        metadata = await model_pb2_grpc.ModelServiceStub(self._channel).Describe(model_pb2.DescribeRequest())
        await context.send_initial_metadata(((INCARNATION, incarnation or metadata.incarnation),))

        async def pass_on() -> None:
            while (request := await context.read()) is not grpc.aio.EOF:
                await call.write(request)
            await call.done_writing()

        passing = asyncio.ensure_future(pass_on())
        try:
            while (answer := await call.read()) is not grpc.aio.EOF:
                async for changed in lie(answer):
                    await context.write(changed)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "", error.trailing_metadata())
        finally:
            passing.cancel()
            call.cancel()


class _Multiplexing(MultiplexService):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.calls = set[Any]()

    async def Multiplex(self, request_iterator: Any, context: Any) -> None:
        self.calls.add(context)
        try:
            await super().Multiplex(request_iterator, context)
        finally:
            self.calls.discard(context)


class _Draft(draft_pb2_grpc.DraftServiceServicer):
    def __init__(self, rogue: Rogue) -> None:
        self._rogue = rogue

    async def Propose(self, request_iterator: Any, context: Context) -> None:
        await self._rogue.serve(context)


class _Target(target_pb2_grpc.TargetServiceServicer):
    def __init__(self, rogue: Rogue) -> None:
        self._rogue = rogue

    async def Verify(self, request_iterator: Any, context: Context) -> None:
        await self._rogue.serve(context)


@contextlib.asynccontextmanager
async def coordinator_of(target: str, draft: str, *options: str) -> AsyncIterator[tuple[RunningSpecd, RawClient, str]]:
    """Run a coordinator of these workers; yields it with a client and the address of its metrics."""
    timeouts = ["--draft-timeout-seconds", "0.5", "--target-timeout-seconds", "2", "--target-recovery-seconds", "4"]
    command = ["coordinator", "--target", target, "--draft", draft, "--listen", "127.0.0.1:0"]
    command += ["--metrics-listen", "127.0.0.1:0", "--no-lookup", *timeouts, *options]
    async with start_specd(*command, SPECD_LOG_FORMAT="json") as running:
        ready = await running.next_event("ready")
        reading = asyncio.ensure_future(_keep_reading(running))
        async with RawClient(ready["address"]) as client:
            yield running, client, ready["metrics_address"]
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _keep_reading(running: RunningSpecd) -> None:
    """Keep the log, so that the process does not wait for a reader of its pipe."""
    assert running.process.stderr is not None
    while line := await running.process.stderr.readline():
        running.lines.append(line.decode())
