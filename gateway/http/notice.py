"""The comment that a stream of events repeats while it has no event."""

from __future__ import annotations

import asyncio


class Notice:
    """A text about what a stream waits for; empty if it waits for nothing special."""

    def __init__(self) -> None:
        self.text = ""
        self._has_changed = asyncio.Event()

    def say(self, text: str) -> None:
        """Change the text, which is one line."""
        if text != self.text:
            self.text = text
            self._has_changed.set()

    async def changed(self) -> None:
        """Wait until the text changes."""
        await self._has_changed.wait()
        self._has_changed.clear()
