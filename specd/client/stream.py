"""A generation as it comes, in a thread of the caller's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from specd.client.events import Completion, Delta, Event, Retrying
from specd.client.protocol.errors import error_from
from specd.client.received import Received
from specd.client.resuming.generation import ResumableGeneration, ended_early
from specd.errors import SpecdError
from specd.v1 import generation_pb2

# Opens a call: the request, and the seconds that it may take.
Open = Callable[[generation_pb2.GenerateRequest, float | None], Any]


class Stream(Received, Iterator[Event]):
    """The events of a generation: `Delta`, `Retrying` where it had to be asked for again, `Finished` last.

    It asks for nothing before the first event is read. Closing it, or leaving its `with` block, ends the generation.
    All that reads it raises a SpecdError if the generation fails; `text` and `tokens` have what came.
    """

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

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        event: Event = next(self._events)
        return event

    def texts(self) -> Iterator[str]:
        """Return the text piece by piece."""
        return (event.text for event in self if isinstance(event, Delta) and event.text)

    def completion(self) -> Completion:
        """Wait for the end, and return all that came."""
        for _ in self:
            pass
        return self._completed()

    def messages(self) -> Iterator[generation_pb2.GenerateResponse]:
        """Return the messages of the protocol, in place of events."""
        return (message for message in self._messages if not isinstance(message, Retrying))

    def close(self) -> None:
        """End the generation, if it has not ended."""
        self._is_closed = True
        if self._call is not None:
            self._call.cancel()

    def _read(self, take: Callable[[generation_pb2.GenerateResponse], Iterator[Any]]) -> Iterator[Any]:
        """Yield what `take` makes of each message, and a Retrying before each pause."""
        give_up_at = None if self._timeout_seconds is None else time.monotonic() + self._timeout_seconds
        while not self._is_closed:
            seconds_left = None if give_up_at is None else max(give_up_at - time.monotonic(), 0.0)
            self._call = self._open(self._generation.next_request(), seconds_left)
            try:
                for response in self._call:
                    yield from take(response)
                failure: SpecdError = ended_early()
            except grpc.RpcError as error:
                failure = error_from(error, self._address)
            finally:
                self._call.cancel()
            if self._generation.completion is not None or self._is_closed:
                return
            retrying = self._generation.failed(failure)
            yield retrying
            time.sleep(retrying.after_seconds)
