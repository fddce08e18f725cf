# Written by `make client` from async_stream.py: change that one.
"""A generation as it comes, in a thread of the caller's."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

from specd.client.calls import failures, sleep
from specd.client.events import Completion, Delta, Event, Retrying
from specd.client.received import Open, Received
from specd.client.resuming.generation import ResumableGeneration, ended_early
from specd.errors import SpecdError
from specd.v1 import generation_pb2


class Stream(Received, Iterator[Event]):
    """The events of a generation: `Delta`, `Retrying` where it had to be asked for again, `Finished` last.

    It asks for nothing before the first event is read. Closing it, or leaving its `with` block, ends the
    generation. All that reads it raises a SpecdError if the generation fails; `text` and `tokens` have what came.
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
        for event in self:
            if isinstance(event, Delta) and event.text:
                yield event.text

    def completion(self) -> Completion:
        """Wait for the end, and return all that came."""
        for _ in self:
            pass
        return self._completed()

    def messages(self) -> Generator[generation_pb2.GenerateResponse]:
        """Return the messages of the protocol, in place of events."""
        with contextlib.closing(self._messages) as messages:
            for message in messages:
                if not isinstance(message, Retrying):
                    yield message

    def cancel(self) -> None:
        """End the generation, if it has not ended, also while another thread reads it: no more events come."""
        self._is_closed = True
        if self._call is not None:
            self._call.cancel()

    def close(self) -> None:
        """Cancel the generation, and free what reads it."""
        self.cancel()
        for generator in (self._events, self._messages):
            with contextlib.suppress(ValueError):  # it is being read, and ends with the call
                generator.close()

    def _read(self, take: Callable[[generation_pb2.GenerateResponse], Iterator[Any]]) -> Generator[Any]:
        """Yield what `take` makes of each message, and a Retrying before each pause."""
        give_up_at = None if self._timeout_seconds is None else time.monotonic() + self._timeout_seconds
        while not self._is_closed:
            seconds_left = None if give_up_at is None else max(give_up_at - time.monotonic(), 0.0)
            request = self._generation.next_request()
            try:
                with failures(self._address, self._generation.connection):
                    self._call = self._open(request, seconds_left)
                    for response in self._call:
                        for taken in take(response):
                            if self._is_closed:
                                return
                            yield taken
                failure: SpecdError = ended_early()
            except SpecdError as error:
                failure = error
            finally:
                if self._call is not None:
                    self._call.cancel()
            if self._generation.completion is not None or self._is_closed:
                return
            retrying = self._generation.failed(failure)
            yield retrying
            sleep(retrying.after_seconds)
