"""The command `specd demo`."""

from __future__ import annotations

import asyncio
import enum
import os
from typing import Annotated

import typer
from rich.console import Console

from specd.cli.comparison import DEMO_PROMPT, DEMO_SOURCE, DEMO_TOKENS, show_comparison
from specd.launch import check_servers_are_installed, start_logging
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_T5_DRAFT, EMBEDDED_T5_TARGET, EMBEDDED_TARGET
from specd.supervisor import Stack


class Pair(enum.Enum):
    """The embedded pairs."""

    CODE = "code"
    T5 = "t5"


def demo(
    pair: Annotated[
        Pair, typer.Option(help="Decoders that complete code, or T5 models that write a function body.")
    ] = (Pair.CODE),
) -> None:
    """Start everything on an embedded pair, stream a completion, print statistics and stop."""
    check_servers_are_installed()
    os.environ.setdefault("SPECD_LOG_LEVEL", "warning")
    start_logging("demo")
    if pair is Pair.T5:
        asyncio.run(_demo(EMBEDDED_T5_TARGET, EMBEDDED_T5_DRAFT, DEMO_SOURCE, max_tokens=160))
    else:
        asyncio.run(_demo(EMBEDDED_TARGET, EMBEDDED_DRAFT, DEMO_PROMPT, max_tokens=DEMO_TOKENS))


async def _demo(target: str, draft: str, prompt: str, *, max_tokens: int) -> None:
    Console(stderr=True).print("starting draft worker, target worker and coordinator …", style="dim")
    async with Stack(target=target, draft=draft) as stack:
        await show_comparison(stack.address, prompt, max_tokens=max_tokens)
