"""The common part of chat completions and text completions that are under way."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from gateway.choices import Indexed
from gateway.fields import SamplingFields
from gateway.http.event_stream import DONE, data
from gateway.served_model import ModelCard
from gateway.usage import timings_of, usage_of
from specd.client import Delta, GenerationStatistics


def head_of(model: ModelCard, seed: int) -> dict[str, Any]:
    """Return the fields of every answer that say what gave it."""
    return {"model": model.model_id, "system_fingerprint": model.system_fingerprint, "seed": seed}


class CompletionComposer(ABC):
    """A completion under way: `num_choices` choices, for each of `num_prompts` as many, one prompt after the other."""

    def __init__(
        self,
        model: ModelCard,
        fields: SamplingFields,
        seed: int,
        *,
        prefix: str,
        num_choices: int,
        num_prompts: int = 1,
    ) -> None:
        self._num_choices = num_choices
        self._num_prompts = num_prompts
        self._options = fields.stream_options
        self._statistics: dict[int, GenerationStatistics] = {}
        self._session_id = ""
        self._head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), **head_of(model, seed)}

    async def whole(self, deltas: AsyncGenerator[Indexed]) -> dict[str, Any]:
        """Return the whole completion. Raises ApiError."""
        async with aclosing(deltas) as coming:
            async for index, delta in coming:
                self._note(index, delta)
                self._take(index, delta)
        return {
            **self._head,
            "object": self._kind,
            "choices": [self._choice(index) for index in range(self._num_choices)],
            "usage": self._usage(),
            "timings": timings_of(self._in_order()),
            **self._session(),
        }

    async def events(self, deltas: AsyncGenerator[Indexed]) -> AsyncGenerator[bytes]:
        """Yield the completion in chunks. Raises ApiError."""
        head = {**self._head, "object": self._kind_of_chunks}
        has_usage = self._options is not None and bool(self._options.include_usage)
        usage: dict[str, Any] = {"usage": None} if has_usage else {}
        async with aclosing(deltas) as coming:
            async for index, delta in coming:
                self._note(index, delta)
                chunks = [{**head, "choices": [choice], **usage} for choice in self._chunks(index, delta)]
                if delta.finished is not None:
                    chunks[-1] |= {"timings": timings_of([delta.finished.statistics]), **self._session()}
                if chunks:
                    yield b"".join(map(data, chunks))
        if has_usage:
            yield data({**head, "choices": [], "usage": self._usage()})
        yield DONE

    _kind: str
    _kind_of_chunks: str

    @abstractmethod
    def _take(self, index: int, delta: Delta) -> None:
        """Add what a choice got."""

    @abstractmethod
    def _choice(self, index: int) -> dict[str, Any]:
        """Return a choice, after its last delta."""

    @abstractmethod
    def _chunks(self, index: int, delta: Delta) -> Sequence[dict[str, Any]]:
        """Return the choices of the chunks for a delta; for the last one of a choice, at least one."""

    def _usage(self) -> dict[str, Any]:
        return usage_of(self._in_order(), prompts=self._num_prompts)

    def _in_order(self) -> list[GenerationStatistics]:
        return [self._statistics[index] for index in sorted(self._statistics)]

    def _note(self, index: int, delta: Delta) -> None:
        self._session_id = delta.session_id
        if delta.finished is not None:
            self._statistics[index] = delta.finished.statistics

    def _session(self) -> dict[str, str]:
        """Return the id of the session that another request can continue; several choices have no common session."""
        return {"session_id": self._session_id} if self._num_choices == 1 else {}
