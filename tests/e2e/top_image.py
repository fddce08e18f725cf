"""Draws a frame of `specd top` over a real load into docs/images: python -m tests.e2e.top_image."""

from __future__ import annotations

import asyncio
import io
import re
import time
from pathlib import Path

from rich.console import Console

from specd.bench.prompts import load_prompts
from specd.cli.scrape import MetricsReader
from specd.cli.top import View
from specd.client import AsyncClient
from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack

_SECONDS = 25
_IMAGE = Path(__file__).parents[2] / "docs" / "images" / "top.svg"
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # they would be loaded from elsewhere


async def keep_asking(client: AsyncClient, prompts: list[str]) -> None:
    """Be one client for as long as the drawing takes."""
    end = time.monotonic() + _SECONDS + 2
    while time.monotonic() < end:
        prompts.append(prompts.pop(0))
        async for _ in client.generate(prompts[0], max_tokens=64):
            pass


async def draw() -> None:
    """Watch two clients, as `specd top` does, and draw the last frame."""
    environment = {"SPECD_LOG_LEVEL": "error"}
    async with (
        Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, environment=environment) as stack,
        AsyncClient(stack.address) as client,
    ):
        prompts = [*load_prompts().values()]
        load = asyncio.gather(keep_asking(client, prompts), keep_asking(client, prompts))
        view = View("127.0.0.1:9464")
        reader = MetricsReader(stack.coordinator.facts["metrics_address"], None, None, None)
        for _ in range(_SECONDS):
            await asyncio.sleep(1)
            view.add(await asyncio.to_thread(reader.read))
        await load
    console = Console(record=True, width=80, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(view.frame())
    _IMAGE.write_text(_FONTS.sub("", console.export_svg(title="specd top")))


if __name__ == "__main__":
    asyncio.run(draw())
