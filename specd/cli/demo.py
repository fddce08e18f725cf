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
    if pair is Pair.T5:
        asyncio.run(_demo(EMBEDDED_T5_TARGET, EMBEDDED_T5_DRAFT, DEMO_SOURCE, max_tokens=160))
    else:
        head = EMBEDDED_HEAD if pair is Pair.HEAD else ""
        asyncio.run(_demo(EMBEDDED_TARGET, EMBEDDED_DRAFT, DEMO_PROMPT, max_tokens=DEMO_TOKENS, head=head))


async def _demo(target: str, draft: str, prompt: str, *, max_tokens: int, head: str = "") -> None:
    """Show a completion with a draft worker, or with a head of the target in its place."""
    draft, options = ("", {"target-worker": {"self_draft": head}}) if head else (draft, {})
    processes = "target worker" if head else "draft worker, target worker"
    Console(stderr=True).print(f"starting {processes} and coordinator …", style="dim")
    async with Stack(target=target, draft=draft, options=options) as stack:
        await show_comparison(stack.address, prompt, max_tokens=max_tokens)
