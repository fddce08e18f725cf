"""The command `specd up`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING

from rich.console import Console

from specd.launch import check_servers_are_installed, settings_options, start_logging
from specd.settings import LOOKUP, UpSettings
from specd.startup_error import StartupError

if TYPE_CHECKING:
    from specd.cli.supervisor import Stack


@settings_options(UpSettings)
def up(settings: UpSettings) -> None:
    """Start draft worker, target worker, coordinator and, with --http, gateway; restart what ends; stop on Ctrl-C."""
    check_servers_are_installed()
    start_logging("up")
    asyncio.run(_up(settings))


async def _up(settings: UpSettings) -> None:
    from specd.cli.supervisor import Stack

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
