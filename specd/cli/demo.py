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
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_HEAD, EMBEDDED_T5_DRAFT, EMBEDDED_T5_TARGET, EMBEDDED_TARGET
from specd.supervisor import Stack


class Pair(enum.Enum):
    """The embedded pairs."""

    CODE = "code"
    HEAD = "head"
    T5 = "t5"


def demo(
    pair: Annotated[
        Pair,
        typer.Option(
            help="Decoders that complete code, the same target with a head that drafts in its process, or T5 models "
            "that write a function body."
        ),
    ] = (Pair.CODE),
) -> None:
    """Start everything on an embedded pair, stream a completion, print statistics and stop."""
    check_servers_are_installed()
    os.environ.setdefault("SPECD_LOG_LEVEL", "warning")
    start_logging("demo")
    match pair:
        case Pair.CODE:
            asyncio.run(_demo(EMBEDDED_TARGET, EMBEDDED_DRAFT, DEMO_PROMPT, max_tokens=DEMO_TOKENS))
        case Pair.HEAD:
            asyncio.run(_demo(EMBEDDED_TARGET, EMBEDDED_HEAD, DEMO_PROMPT, max_tokens=DEMO_TOKENS, in_target=True))
        case Pair.T5:
            asyncio.run(_demo(EMBEDDED_T5_TARGET, EMBEDDED_T5_DRAFT, DEMO_SOURCE, max_tokens=160))


async def _demo(target: str, draft: str, prompt: str, *, max_tokens: int, in_target: bool = False) -> None:
    """Show a completion, with a draft worker or with a draft in the target's process."""
    if in_target:
        processes = "target worker"
        started = Stack(target=target, draft="", options={"target-worker": {"self_draft": draft}})
    else:
        processes = "draft worker, target worker"
        started = Stack(target=target, draft=draft)
    Console(stderr=True).print(f"starting {processes} and coordinator …", style="dim")
    async with started as stack:
        await show_comparison(stack.address, prompt, max_tokens=max_tokens)
