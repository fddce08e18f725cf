"""A fake model for an engine: it records the feeds, and makes no logits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

from specd.worker.engine.engine import Engine
from specd.worker.engine.jobs import Encode, Feed, Steps


@dataclass(frozen=True)
class FakeFeed:
    """A feed with a number of tokens; its logits are its name."""

    name: str
    num_tokens: int = 1
    wants_logits: bool = True
    network: str = "target"


class FakeModel:
    """Records its forward passes, each as the names of the feeds."""

    def __init__(self) -> None:
        self.passes: list[list[str]] = []
        self.error: Exception | None = None

    def forward(self, wanted: Sequence[Feed | Encode], *, owns_all_cores: bool) -> list[str]:
        names = [cast(FakeFeed, feed).name for feed in wanted]
        self.passes.append(names)
        if self.error is not None:
            raise self.error
        return names


def feed(name: str, **fields: Any) -> Feed:
    return cast(Feed, FakeFeed(name, **fields))


def steps(name: str, count: int, **fields: Any) -> Steps[str]:
    for _ in range(count):
        assert (yield feed(name, **fields)) == name  # and not the logits of another job
    return name


def hold_until(event: threading.Event) -> Steps[None]:
    event.wait()
    return
    yield


@asynccontextmanager
async def held_up(engine: Engine) -> AsyncIterator[None]:
    """Keep the engine busy, so that all jobs submitted within the context have arrived when it continues."""
    start = threading.Event()
    holding = engine.submit(hold_until(start))
    try:
        yield
    finally:
        start.set()
    await holding


async def run_together(engine: Engine, *jobs: Steps[Any]) -> list[Any]:
    """Submit jobs that arrive while the engine is busy, and return what they come to."""
    async with held_up(engine):
        submitted = [engine.submit(job) for job in jobs]
    return [done.result for done in await asyncio.gather(*submitted)]
