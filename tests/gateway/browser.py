"""A real browser without a window: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator

from playwright.async_api import Browser, Page, async_playwright, expect

from specd.supervisor import Stack
from tests.e2e.processes import PATIENCE_SECONDS

CHROMIUM = shutil.which("chromium")
expect.set_options(timeout=1000 * PATIENCE_SECONDS)


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Run Chromium for the length of a block; there must be one."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM)
        try:
            yield browser
        finally:
            await browser.close()


def origin_of(stack: Stack) -> str:
    """Return the address of the page of a stack."""
    assert stack.gateway is not None
    return f"http://{stack.gateway.facts['address']}/"


async def open_with_token(page: Page, stack: Stack, secret: str) -> None:
    """Open the page, and enter a token."""
    await page.goto(origin_of(stack))
    await expect(page.get_by_text("needs a token")).to_be_visible()
    await page.get_by_label("Token", exact=True).fill(secret)
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("button", name="Generate")).to_be_enabled()
