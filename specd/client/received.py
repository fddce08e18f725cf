"""What of a generation has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from specd.client.events import Completion, CompletionToken
from specd.client.resuming.generation import ResumableGeneration
from specd.v1 import generation_pb2

# Opens a call: the serialised request, and the seconds that it may take.
Open = Callable[[bytes, float | None], Any]


class Received:
    """What both kinds of streams say about what has come so far, while they are read and after an error."""

    def __init__(self, generation: ResumableGeneration) -> None:
        self._generation = generation

    @property
    def text(self) -> str:
        """The text so far."""
        return self._generation.text

    @property
    def tokens(self) -> Sequence[CompletionToken]:
        """The tokens so far."""
        return tuple(self._generation.tokens)

    @property
    def session_id(self) -> str:
        """The session's id; empty before the first token."""
        return self._generation.session_id

    @property
    def seed(self) -> int:
        """The seed that tokens are chosen with; 0 before the first token."""
        return self._generation.seed

    def _completed(self) -> Completion:
        if self._generation.completion is None:
            raise RuntimeError("the stream was closed before its end")
        return self._generation.completion

    def _take_whole(self, response: generation_pb2.GenerateResponse) -> Iterator[generation_pb2.GenerateResponse]:
        list(self._generation.take(response))
        yield response
