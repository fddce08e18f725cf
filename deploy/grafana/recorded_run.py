"""A run of the included pair under a load that varies, as a real Prometheus saw it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from deploy.grafana.reader import Dashboard
from deploy.prometheus.local import LocalPrometheus
from specd.bench.prompts import load_prompts
from specd.rpc.client import RawClient
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from specd.v1.sampling_pb2 import SamplingParameters

_SETTINGS = {
    "SPECD_COORDINATOR_MAX_SESSIONS": "4",
    "SPECD_COORDINATOR_MAX_QUEUED": "4",
    "SPECD_LOG_LEVEL": "error",
}


@dataclass(frozen=True)
class Phase:
    """A part of the run: so many clients, each asking again when it has its answer."""

    seconds: float
    num_clients: int
    temperature: float = 0.0
    draft_is_away: bool = False


PHASES = (
    Phase(45, 1),
    Phase(45, 3),
    Phase(30, 3, draft_is_away=True),
    Phase(60, 3, temperature=1.0),
    Phase(30, 12),  # more than may run and wait
    Phase(45, 1),
)


@dataclass(frozen=True)
class Line:
    """One series of a panel: its values by seconds since the beginning."""

    legend: str
    values: dict[int, float]


async def record(dashboards: Sequence[Dashboard], scrape_seconds: int) -> list[dict[str, list[Line]]]:
    """Run all phases, and return what the panels of each dashboard, by title, show of them."""
    async with Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, environment=_SETTINGS) as stack:
        addresses = {child.name: child.facts["metrics_address"] for child in stack.children}
        async with (
            LocalPrometheus(addresses, interval_seconds=scrape_seconds) as prometheus,
            RawClient(stack.address) as client,
        ):
            began_at = time.time()
            for number, phase in enumerate(PHASES):
                await run_phase(phase, stack, client, random.Random(number))
            return [await ask(prometheus, dashboard, began_at, time.time()) for dashboard in dashboards]


async def run_phase(phase: Phase, stack: Stack, client: RawClient, source: random.Random) -> None:
    """Run a phase of a load."""
    assert stack.draft is not None
    if phase.draft_is_away:
        os.kill(stack.draft.pid, signal.SIGSTOP)
    try:
        await asyncio.gather(*(_keep_asking(client, phase, source) for _ in range(phase.num_clients)))
    finally:
        os.kill(stack.draft.pid, signal.SIGCONT)


async def _keep_asking(client: RawClient, phase: Phase, source: random.Random) -> None:
    """Be one client for a phase; now and then one that has no prompt, or goes away after a second."""
    text = "\n".join(load_prompts().values())
    end = time.monotonic() + phase.seconds
    while time.monotonic() < end:
        begin = source.randrange(len(text))
        prompt = text[begin : begin + source.choice((0, 200, 200, 400, 400, 800, 800, 1600))]
        sampling = SamplingParameters(temperature=phase.temperature, seed=source.randrange(2**32))
        try:
            async with asyncio.timeout(1 if source.random() < 0.1 else None):
                async for _ in client.generate(prompt, max_tokens=source.randint(32, 96), sampling=sampling):
                    pass
        except TimeoutError:
            pass
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.5)


async def ask(
    prometheus: LocalPrometheus, dashboard: Dashboard, began_at: float, ended_at: float
) -> dict[str, list[Line]]:
    """Return what the panels of a dashboard, by title, show of a time, a value for each scrape."""
    variables = await dashboard.choose_all(prometheus)
    shown = {}
    for panel in dashboard.panels:
        lines = []
        for query in panel.queries:
            expression = query.resolved(variables)
            for series in await prometheus.query_range(expression, began_at, ended_at, prometheus.interval_seconds):
                values = {round(at - began_at): float(value) for at, value in series["values"]}
                lines.append(Line(query.legend(series), values))
        shown[panel.title] = lines
    return shown
