"""Draws the page over a real answer into docs/images/page.png: python -m tests.gateway.page_image."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from tests.gateway.browser import chromium

IMAGE = Path(__file__).parents[2] / "docs" / "images" / "page.png"


async def draw() -> None:
    """Ask twice, because the first answer warms up, then the target alone."""
    environment = {"SPECD_LOG_LEVEL": "error"}
    async with (
        Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, http="127.0.0.1:0", environment=environment) as stack,
        chromium() as browser,
    ):
        assert stack.gateway is not None
        page = await browser.new_page(viewport={"width": 1180, "height": 760}, color_scheme="light")
        page.set_default_timeout(120_000)
        await page.goto(f"http://{stack.gateway.facts['address']}/")
        for button, done in (("Generate", "times as fast"), ("Generate", "times as fast"), ("Same with", "same text")):
            await page.get_by_role("button", name=button).click()
            await page.locator("#state").filter(has_text=re.compile(done)).wait_for()
        await page.screenshot(path=IMAGE, full_page=True)


if __name__ == "__main__":
    asyncio.run(draw())
