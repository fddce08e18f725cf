"""The commands that start the whole stack: `specd up` and `specd demo`."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import signal
from typing import Annotated

import typer
from rich.console import Console

from specd.cli.comparison import DEMO_PROMPT, DEMO_SOURCE, show_comparison
from specd.cli.supervisor import Stack
from specd.errors import StartupError
from specd.launch import check_servers_are_installed, start_logging
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_T5_DRAFT, EMBEDDED_T5_TARGET, EMBEDDED_TARGET, LOOKUP, UpSettings


def up(settings: UpSettings) -> None:
    """Start draft worker, target worker, coordinator and, with --http, gateway; restart what ends; stop on Ctrl-C."""
    check_servers_are_installed()
    start_logging("up")
    asyncio.run(_up(settings))


async def _up(settings: UpSettings) -> None:
    stack = Stack(
        target=settings.target,
        draft="" if settings.draft == LOOKUP else settings.draft,
        # If unset, the coordinator's own setting holds.
        lookup=_wants_lookup(settings),
        listen=settings.listen,
        insecure=settings.insecure,
        http=settings.http,
        num_draft_tokens=settings.num_draft_tokens if "num_draft_tokens" in settings.model_fields_set else None,
        metrics_listen=None if settings.metrics else "",
        hang_seconds=settings.hang_seconds,
    )
    holding = asyncio.ensure_future(_hold(stack))

    def on_signal() -> None:
        if holding.cancelling():
            stack.kill()  # the second signal
        holding.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    with contextlib.suppress(asyncio.CancelledError):
        await holding


def _wants_lookup(settings: UpSettings) -> bool | None:
    given = settings.lookup if "lookup" in settings.model_fields_set else None
    if settings.draft == LOOKUP and given is False:
        raise StartupError("wrong settings: --draft lookup and --no-lookup contradict each other: leave one out")
    return given if settings.draft else False


async def _hold(stack: Stack) -> None:
    async with stack:
        facts = stack.coordinator.facts
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        console.print(
            f"[bold green]specd is ready[/] at [bold]{stack.address}[/]: {facts['target']} with draft {facts['draft']}"
        )
        if stack.gateway is not None:
            console.print(f"  OpenAI's API: {stack.gateway.facts['url']}/v1")
        for child in stack.children:
            if child.facts["metrics_url"]:
                console.print(f"  metrics of the {child.name}: {child.facts['metrics_url']}")
        console.print(f"  try: specd generate --address {stack.address} 'def fibonacci(n):'")
        await stack.wait()


class Pair(enum.Enum):
    """The embedded pairs."""

    CODE = "code"
    T5 = "t5"


def demo(
    pair: Annotated[Pair, typer.Option(help="The decoders that complete code, or the T5s that summarise it.")] = (
        Pair.CODE
    ),
) -> None:
    """Start all processes on an embedded pair, stream a completion, print statistics, stop."""
    check_servers_are_installed()
    os.environ.setdefault("SPECD_LOG_LEVEL", "warning")
    start_logging("demo")
    if pair is Pair.T5:
        asyncio.run(_demo(EMBEDDED_T5_TARGET, EMBEDDED_T5_DRAFT, DEMO_SOURCE))
    else:
        asyncio.run(_demo(EMBEDDED_TARGET, EMBEDDED_DRAFT, DEMO_PROMPT))


async def _demo(target: str, draft: str, prompt: str) -> None:
    Console(stderr=True).print("starting draft worker, target worker and coordinator …", style="dim")
    async with Stack(target=target, draft=draft) as stack:
        await show_comparison(stack.address, prompt)
