"""The stack of a `specd up`, which runs until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specd.cli.preflight import Preflight
    from specd.supervisor import Stack
    from specd.up_settings import UpSettings


def new_stack(settings: UpSettings, preflight: Preflight, **models: Any) -> Stack:
    """Return the stack of a `specd up`, of which `models` are the arguments about its models."""
    from specd.supervisor import Stack

    return Stack(
        listen=settings.listen,
        insecure=settings.insecure,
        http=settings.http,
        num_draft_tokens=settings.num_draft_tokens if "num_draft_tokens" in settings.model_fields_set else None,
        metrics_listen=None if settings.metrics else "",
        hang_seconds=settings.hang_seconds,
        options=preflight.options,
        **models,
    )


async def run_stack(
    stack: Stack, on_ready: Callable[[], None], starting: contextlib.AbstractContextManager[Any] | None = None
) -> None:
    """Start a stack within `starting`, call `on_ready`, and stop it at a signal; a second one kills its processes.

    Raises StartupError if it cannot start, or is given up.
    """

    async def hold() -> None:
        async with contextlib.AsyncExitStack() as running:
            with starting or contextlib.nullcontext():
                await running.enter_async_context(stack)
            on_ready()
            await stack.wait()

    holding = asyncio.ensure_future(hold())

    def on_signal() -> None:
        if holding.cancelling():
            stack.kill()  # the second signal
        holding.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    with contextlib.suppress(asyncio.CancelledError):
        await holding
