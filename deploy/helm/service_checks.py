"""Checks of a specd that runs somewhere: texts with and without speculation, and texts while a target is disturbed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specd import AsyncClient
from specd.client import Completion, RetryPolicy
from specd.errors import SpecdError
from specd.rpc.credentials import ClientCredentials

# Code, for the included pair; other models continue it too.
PROMPTS = (
    "def fibonacci(n):",
    "class Stack:\n    def __init__(self):",
    "import json\n\ndef read_settings(path):",
    "def is_prime(n):\n    if n < 2:",
    "def word_count(text):\n    counts = {}",
    "class Point:\n    def __init__(self, x, y):",
    "def quicksort(items):",
    "from pathlib import Path\n\ndef largest_files(directory):",
)
_PATIENCE_SECONDS = 120.0


@dataclass(frozen=True)
class Outcome:
    """The outcome of one check; `figures` are counts, and times in seconds."""

    name: str
    passed: bool
    figures: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the outcome for a JSON file."""
        return asdict(self)


class ServiceChecks:
    """Checks over one connection, as an async context manager."""

    def __init__(
        self, address: str, credentials: ClientCredentials, *, prompts: Sequence[str] = PROMPTS, max_tokens: int = 96
    ) -> None:
        """Check the coordinator at an address, with texts of `max_tokens` tokens."""
        retries = RetryPolicy(patience_seconds=_PATIENCE_SECONDS)
        self._client = AsyncClient(address, credentials=credentials, retries=retries)
        self._prompts = prompts
        self._max_tokens = max_tokens
        self.expected: list[str] = []

    async def __aenter__(self) -> ServiceChecks:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._client.__aexit__(*exc_info)

    async def compare(self) -> Outcome:
        """Generate each text with and without speculation. They are equal, but for near ties in 16 bits."""
        began = time.monotonic()
        try:
            alone = [await self._complete(prompt, num_draft_tokens=0) for prompt in self._prompts]
            drafted = [await self._complete(prompt) for prompt in self._prompts]
        except SpecdError as error:
            return Outcome("texts with and without speculation", False, problem=_said(error))
        self.expected = [completion.text for completion in drafted]
        wrong = [
            repr(prompt)
            for prompt, one, other in zip(self._prompts, alone, drafted, strict=True)
            if one.text != other.text and not (one.statistics.near_ties or other.statistics.near_ties)
        ]
        proposed = sum(completion.statistics.proposed_tokens for completion in drafted)
        figures = {
            "texts": len(drafted),
            "equal": sum(one.text == other.text for one, other in zip(alone, drafted, strict=True)),
            "with near ties": sum(bool(completion.statistics.near_ties) for completion in drafted),
            "proposed tokens": proposed,
            "accepted tokens": sum(completion.statistics.accepted_tokens for completion in drafted),
            "tokens/s alone": round(_pace(alone), 1),
            "tokens/s": round(_pace(drafted), 1),
            "seconds": round(time.monotonic() - began, 1),
        }
        problem = f"other texts without a near tie: {', '.join(wrong)}" if wrong else ""
        if not proposed:
            problem = problem or "no token was proposed: speculation was not tried"
        return Outcome("texts with and without speculation", not problem, figures, problem)

    async def under_load(
        self, name: str, disturb: Callable[[], Awaitable[None]], *, num_sessions: int = 4, seconds_after: float = 5.0
    ) -> Outcome:
        """Generate with several sessions at a time, from before a disturbance until some time after it.

        No generation may fail, and each text must be the one that `compare` got.
        """
        stopping = asyncio.Event()
        runs: list[_Run] = []
        sessions = [
            asyncio.ensure_future(self._generate_until(stopping, number, runs)) for number in range(num_sessions)
        ]
        problem = ""
        began = time.monotonic()
        try:
            await asyncio.sleep(1.0)  # all sessions run
            await disturb()
            took = time.monotonic() - began - 1.0
            await asyncio.sleep(seconds_after)
        except (OSError, RuntimeError) as error:
            problem, took = f"the disturbance failed: {error}", 0.0
        finally:
            stopping.set()
            await asyncio.gather(*sessions)
        failed = [run.error for run in runs if run.error]
        wrong = [run for run in runs if not run.error and not run.is_right]
        if failed:
            problem = problem or f"{len(failed)} generations failed, the first one with: {failed[0]}"
        elif wrong:
            problem = problem or f"{len(wrong)} texts are not those of the undisturbed service"
        figures = {
            "texts": len(runs),
            "failed": len(failed),
            "wrong": len(wrong),
            "moved or replayed": sum(run.num_replays > 0 for run in runs),
            "longest pause": round(max((run.longest_pause for run in runs), default=0.0), 2),
            "seconds of the disturbance": round(took, 1),
        }
        return Outcome(name, not problem and bool(runs), figures, problem)

    async def _generate_until(self, stopping: asyncio.Event, number: int, runs: list[_Run]) -> None:
        while not stopping.is_set():
            index = number % len(self._prompts)
            runs.append(await self._run(index))
            number += 1

    async def _run(self, index: int) -> _Run:
        stream = self._client.generate(self._prompts[index], max_tokens=self._max_tokens)
        longest, last = 0.0, time.monotonic()
        try:
            async for _ in stream:
                now = time.monotonic()
                longest, last = max(longest, now - last), now
            completion = await stream.completion()
        except SpecdError as error:
            return _Run(False, longest, error=_said(error))
        is_right = completion.text == self.expected[index] or bool(completion.statistics.near_ties)
        return _Run(is_right, longest, completion.statistics.target_replays)

    async def _complete(self, prompt: str, **options: Any) -> Completion:
        return await self._client.generate(prompt, max_tokens=self._max_tokens, **options).completion()


@dataclass(frozen=True)
class _Run:
    is_right: bool
    longest_pause: float  # seconds
    num_replays: int = 0
    error: str = ""


def _pace(completions: Sequence[Completion]) -> float:
    statistics = [completion.statistics for completion in completions]
    seconds = sum(each.decode_seconds for each in statistics)
    return sum(each.generated_tokens - 1 for each in statistics) / seconds if seconds else 0.0


def _said(error: SpecdError) -> str:
    return f"{type(error).__name__} ({error.reason}): {error}"
