"""A generation as it comes, in an event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Any

import grpc

from specd.client.events import Completion, Delta, Event, Retrying
from specd.client.protocol.errors import client_closed, error_from
from specd.client.received import Received
from specd.client.resuming.generation import ResumableGeneration, ended_early
from specd.client.stream import Open
from specd.errors import SpecdError
from specd.v1 import generation_pb2


class AsyncStream(Received, AsyncIterator[Event]):
    """The events of a generation: what `Stream` is to a thread, for `async for` and `async with`."""

    def __init__(
        self, generation: ResumableGeneration, open_call: Open, address: str, timeout_seconds: float | None
    ) -> None:
        super().__init__(generation)
        self._open = open_call
        self._address = address
        self._timeout_seconds = timeout_seconds
        self._call: Any = None
        self._is_closed = False
        self._events = self._read(generation.take)
        self._messages = self._read(self._take_whole)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        event: Event = await anext(self._events)
        return event

    async def texts(self) -> AsyncIterator[str]:
        """Return the text piece by piece."""
        async for event in self:
            if isinstance(event, Delta) and event.text:
                yield event.text

    async def completion(self) -> Completion:
        """Wait for the end, and return all that came."""
        async for _ in self:
            pass
        return self._completed()

    async def messages(self) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Return the messages of the protocol, in place of events."""
        async with aclosing(self._messages) as messages:
            async for message in messages:
                if not isinstance(message, Retrying):
                    yield message

    async def close(self) -> None:
        """End the generation, if it has not ended, also while another task reads it."""
        self._is_closed = True
        if self._call is not None:
            self._call.cancel()
        for generator in (self._events, self._messages):
            if not generator.ag_running:  # type: ignore[attr-defined]
                await generator.aclose()

    async def _read(self, take: Callable[[generation_pb2.GenerateResponse], Iterator[Any]]) -> AsyncGenerator[Any]:
        """Yield what `take` makes of each message, and a Retrying before each pause."""
        give_up_at = None if self._timeout_seconds is None else time.monotonic() + self._timeout_seconds
        while not self._is_closed:
            seconds_left = None if give_up_at is None else max(give_up_at - time.monotonic(), 0.0)
            self._call = self._open(self._generation.next_request(), seconds_left)
            try:
                async for response in self._call:
                    for taken in take(response):
                        yield taken
                failure: SpecdError = ended_early()
            except grpc.aio.AioRpcError as error:
                failure = error_from(error, self._address)
            except asyncio.CancelledError:
                if is_task_cancelled():
                    raise
                # The call was cancelled here: the stream or the client was closed.
                failure = client_closed()
            finally:
                self._call.cancel()
            if self._generation.completion is not None or self._is_closed:
                return
            retrying = self._generation.failed(failure)
            yield retrying
            await asyncio.sleep(retrying.after_seconds)


def is_task_cancelled() -> bool:
    """Whether a CancelledError is this task's own, and not that of a call: gRPC raises the same for both."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
