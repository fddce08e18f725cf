"""Draws the page over real answers into docs/images: python -m tests.gateway.page_image."""

from __future__ import annotations

import asyncio
import re
import tempfile
from pathlib import Path

from playwright.async_api import Browser, Page

from specd.settings import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specd.supervisor import Stack
from tests.gateway.arranged_model import save_arranged_model
from tests.gateway.browser import chromium

IMAGES = Path(__file__).parents[2] / "docs" / "images"
QUIET = {"SPECD_LOG_LEVEL": "error"}


async def draw() -> None:
    """Draw a completion and a conversation."""
    async with chromium() as browser:
        await draw_completion(browser)
        await draw_conversation(browser)


async def draw_completion(browser: Browser) -> None:
    """Ask the included pair twice, because the first answer warms up, then the target alone."""
    async with Stack(target=EMBEDDED_TARGET, draft=EMBEDDED_DRAFT, http="127.0.0.1:0", environment=QUIET) as stack:
        page = await opened(browser, stack)
        for button, done in (("Generate", "times as fast"), ("Generate", "times as fast"), ("Same with", "same text")):
            await page.get_by_role("button", name=button).click()
            await page.locator("#state").filter(has_text=re.compile(done)).wait_for()
        await page.screenshot(path=IMAGES / "page.png", full_page=True)


async def draw_conversation(browser: Browser) -> None:
    """Talk with a model that follows scripts, and point at a token."""
    with tempfile.TemporaryDirectory() as directory:
        model = save_arranged_model(Path(directory) / "arranged")
        async with Stack(target=model, draft=model, http="127.0.0.1:0", environment=QUIET) as stack:
            page = await opened(browser, stack)
            for message in ("think", "markdown"):
                await page.get_by_label("Message", exact=True).fill(message)
                await page.keyboard.press("Enter")
                await page.locator("#state").filter(has_text=re.compile("a second")).wait_for()
            await page.locator("#answer strong .token").first.hover()
            await page.screenshot(path=IMAGES / "page-chat.png", full_page=True)


async def opened(browser: Browser, stack: Stack) -> Page:
    """Return the page of a stack."""
    assert stack.gateway is not None
    page = await browser.new_page(viewport={"width": 1180, "height": 760}, color_scheme="light")
    page.set_default_timeout(120_000)
    await page.goto(f"http://{stack.gateway.facts['address']}/")
    return page


if __name__ == "__main__":
    asyncio.run(draw())
