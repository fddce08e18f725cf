"""A real browser without a window: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator

from playwright.async_api import Browser, async_playwright

CHROMIUM = shutil.which("chromium")


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Run Chromium for the length of a block; there must be one."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM)
        try:
            yield browser
        finally:
            await browser.close()
