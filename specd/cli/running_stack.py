"""A stack that runs until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specd.supervisor import Stack


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
