"""Both clients on a real connection: one that they close, and one whose server cancels their calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from specd.client import AsyncClient, AsyncStream, CallError, Client, GenerationOptions
from specd.v1.generation_pb2 import GenerateRequest, GenerateResponse
from specd.v1.generation_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server
from tests.unit.mortal_server import Death, MortalServer

OPTIONS: GenerationOptions = {"seed": 5, "temperature": 1.0, "max_tokens": 20, "ignore_eos": True}
KINDS = pytest.mark.parametrize("kind", [Client, AsyncClient])


class Service(GenerationServiceServicer):
    """Serves what a mortal server serves. A call waits after `stalls_after` messages, if that is set."""

    def __init__(self, *deaths: Death, stalls_after: int | None = None) -> None:
        self.server = MortalServer(deaths)
        self._stalls_after = stalls_after

    async def Generate(self, request: GenerateRequest, context: Any) -> AsyncIterator[GenerateResponse]:
        """Stream a completion."""
        sent = 0
        try:
            async for response in self.server.open(request.SerializeToString(), None):
                if sent == self._stalls_after:
                    await asyncio.Event().wait()
                yield response
                sent += 1
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details(), tuple(error.trailing_metadata()))


class Serving:
    """A server of a service, as an async context manager that gives its address."""

    def __init__(self, service: Service) -> None:
        self._server = grpc.aio.server()
        add_GenerationServiceServicer_to_server(service, self._server)

    async def __aenter__(self) -> str:
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def __aexit__(self, *exc_info: object) -> None:
        await self._server.stop(0)


async def until_begun(stream: Any) -> None:
    """Wait until a stream that something else reads has brought all that come before it stalls."""
    while len(stream.tokens) < 3:  # noqa: ASYNC110 - its reader raises no event
        await asyncio.sleep(0.01)


async def read(stream: Any) -> str:
    """Return the text of a stream, read in a task or thread of its own."""
    if isinstance(stream, AsyncStream):
        return "".join([text async for text in stream.texts()])
    return "".join(await asyncio.to_thread(list, stream.texts()))


async def close(what: Any) -> None:
    """Close a client or a stream."""
    if asyncio.iscoroutine(closing := what.close()):
        await closing


async def ask(client: Any) -> None:
    """Ask for something else than a generation."""
    if isinstance(client, AsyncClient):
        await client.describe()
    else:
        await asyncio.to_thread(client.describe)


@KINDS
async def test_a_call_that_the_server_cancels_is_a_broken_one(kind: type[Any]) -> None:
    deaths = [Death(3, loses_sessions=True, status=grpc.StatusCode.CANCELLED) for _ in range(2)]
    calm, hurt = Service(), Service(*deaths)
    async with Serving(calm) as address:
        expected = await read(kind(address).generate("ab", **OPTIONS))
    async with Serving(hurt) as address:
        assert await read(kind(address).generate("ab", **OPTIONS)) == expected
    assert len(hurt.server.requests) == 3
    assert hurt.server.requests[2].resumption.token_ids


@KINDS
async def test_a_reader_is_told_that_its_client_was_closed(kind: type[Any]) -> None:
    async with Serving(Service(stalls_after=3)) as address:
        client = kind(address)
        stream = client.generate("ab", **OPTIONS)
        reading = asyncio.create_task(read(stream))
        await until_begun(stream)
        await close(client)
        with pytest.raises(CallError) as caught:
            await asyncio.wait_for(reading, 10)
        assert caught.value.reason == "CLIENT_CLOSED"
        assert len(stream.tokens) == 3


@KINDS
async def test_a_group_of_tasks_does_not_end_well_with_half_a_text(kind: type[Any]) -> None:
    async with Serving(Service(stalls_after=3)) as address:
        client = kind(address)
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as tasks:
                stream = client.generate("ab", **OPTIONS)
                tasks.create_task(read(stream))
                await until_begun(stream)
                await close(client)


@KINDS
async def test_a_closed_client_says_so(kind: type[Any]) -> None:
    async with Serving(Service()) as address:
        client = kind(address)
        await read(client.generate("ab", **OPTIONS))
        await close(client)
        for call in (lambda: read(client.generate("ab", **OPTIONS)), lambda: ask(client)):
            with pytest.raises(CallError) as caught:
                await call()
            assert caught.value.reason == "CLIENT_CLOSED"


async def test_a_reader_s_own_cancellation_stays_one() -> None:
    async with Serving(Service(stalls_after=3)) as address, AsyncClient(address) as client:
        stream = client.generate("ab", **OPTIONS)
        reading = asyncio.create_task(read(stream))
        await until_begun(stream)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading


@KINDS
async def test_a_stream_can_be_closed_while_it_is_read(kind: type[Any]) -> None:
    async with Serving(Service(stalls_after=3)) as address:
        client = kind(address)
        stream = client.generate("ab", **OPTIONS)
        reading = asyncio.create_task(read(stream))
        await until_begun(stream)
        await close(stream)
        assert await asyncio.wait_for(reading, 10) == stream.text
        await close(client)
